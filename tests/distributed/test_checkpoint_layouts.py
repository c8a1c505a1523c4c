"""Checkpoints into which all ranks write, saved under one layout and resumed under another.

Each is held against Lightning's own file of the same state: whoever resumes from either goes on alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.distributed.lightning_runs import strategy_of, trainer_on_pool
from tests.distributed.pipeline_runs import StageCase, StageLearner
from tests.distributed.sharded_runs import LAYOUTS
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": "ddp"},
    "zero1": {"parallel": "zero1"},
    "zero2": {"parallel": "zero2"},
    "zero3": {"parallel": "zero3"},
    "hsdp": {"parallel": "hsdp"},
    "tensor": {"parallel": {"mode": "tensor", "tensor": {"size": 2}}},
    "tensor zero2": {"parallel": {"mode": "zero2", "tensor": {"size": 2}}},
    "pipeline": {"parallel": {"mode": "pipeline", "pipeline": {"size": 2}}},
    "pipeline zero1": {"parallel": {"mode": "zero1", "pipeline": {"size": 2}}},
    "pipeline tensor": {"parallel": {"mode": "pipeline", "pipeline": {"size": 2}, "tensor": {"size": 2}}},
}


class SaveAtEnd(pl.Callback):
    """Saves while the model is as it was trained."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def _trainer(context: RankContext, strategy: dict[str, Any], **arguments: Any) -> pl.Trainer:
    return trainer_on_pool(context, strategy_of(**strategy), limit_train_batches=3, limit_val_batches=0, **arguments)


def save_both(context: RankContext, folder: str, case: StageCase, strategy: dict[str, Any]) -> None:
    """An epoch, saved in both ways."""
    for mode in ("full", "async_sharded"):
        save = SaveAtEnd(Path(folder) / mode)
        _trainer(context, {**strategy, "checkpoint": mode}, max_epochs=1, callbacks=[save]).fit(StageLearner(case))


def resume_both(context: RankContext, folder: str, case: StageCase, strategy: dict[str, Any]) -> list[Any]:
    """A second epoch, from each."""
    seen = []
    for mode in ("full", "async_sharded"):
        module = StageLearner(case)
        trainer = _trainer(context, strategy, max_epochs=2)
        trainer.fit(module, ckpt_path=Path(folder) / mode)
        weights = {name: value.detach().clone() for name, value in module.net.state_dict().items()}
        seen.append((weights, module.seen, trainer.global_step, trainer.current_epoch))
    return seen


PAIRS = {f"{a}-{b}": (a, b) for a in STRATEGIES for b in STRATEGIES}
ALWAYS = (
    "zero1-pipeline",
    "zero2-tensor",
    "tensor zero2-hsdp",
    "pipeline tensor-ddp",
    "pipeline zero1-zero3",
)  # each once


@pytest.mark.parametrize(("first", "then"), sampled(PAIRS, ALWAYS))
def test_what_one_layout_saves_any_other_resumes(ranks: RankPool, tmp_path: Path, first: str, then: str) -> None:
    case = StageCase(model="even", optimizer="adamw")
    layout = LAYOUTS["2+2"]
    ranks.run(save_both, layout=layout, args=(str(tmp_path), case, STRATEGIES[first]))
    for full, sharded in ranks.run(resume_both, layout=layout, args=(str(tmp_path), case, STRATEGIES[then])):
        assert full[1:] == sharded[1:]
        assert full[2:] == (6, 2)
        assert full[0].keys() == sharded[0].keys()
        for name, value in full[0].items():
            assert torch.equal(value, sharded[0][name]), name


@pytest.mark.parametrize(
    ("first", "then", "layout"),
    [
        ("zero2", "ddp", {"a": [0]}),
        ("pipeline zero1", "zero3", {"a": [0, 1, 2]}),
        pytest.param("zero3", "zero2", {"a": [0, 1, 2], "b": [3, 4, 5]}, marks=pytest.mark.sweep),
        pytest.param("tensor", "pipeline", {"a": [0, 1]}, marks=pytest.mark.sweep),
    ],
)
def test_another_number_of_ranks_resumes(
    ranks: RankPool, tmp_path: Path, first: str, then: str, layout: dict[str, list[int]]
) -> None:
    case = StageCase(model="odd" if "tensor" not in (first, then) else "even", optimizer="adamw")
    ranks.run(save_both, layout=LAYOUTS["2+2"], args=(str(tmp_path), case, STRATEGIES[first]))
    for full, sharded in ranks.run(resume_both, layout=layout, args=(str(tmp_path), case, STRATEGIES[then])):
        assert full[1:] == sharded[1:]
        for name, value in full[0].items():
            assert torch.equal(value, sharded[0][name]), name


def straight_and_resumed(context: RankContext, folder: str, strategy: dict[str, Any]) -> list[list[Any]]:
    """Two epochs at once, and the second one again, from a checkpoint between them."""
    case, save = StageCase(model="even_noisy", optimizer="adamw"), SaveAtEnd(Path(folder) / "half")
    sharded = {**strategy, "checkpoint": "sharded"}
    first = StageLearner(case)  # seeds the generators, as each does
    _trainer(context, sharded, max_epochs=1, callbacks=[save]).fit(first)
    straight = StageLearner(case)
    _trainer(context, strategy, max_epochs=2).fit(straight)
    resumed = StageLearner(case)
    torch.manual_seed(5)
    _trainer(context, strategy, max_epochs=2).fit(resumed, ckpt_path=save.path)
    return [straight.seen[3:], resumed.seen]


@pytest.mark.parametrize("name", ["ddp", "zero3", pytest.param("pipeline", marks=pytest.mark.sweep)])
def test_each_rank_goes_on_drawing_its_own_random_numbers(ranks: RankPool, tmp_path: Path, name: str) -> None:
    arguments = (str(tmp_path), STRATEGIES[name])
    for straight, resumed in ranks.run(straight_and_resumed, world_size=2, args=arguments):
        assert straight == resumed


class SeedByRank(pl.Callback):
    """Each rank draws numbers of its own."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.manual_seed(trainer.global_rank)


class DrawNext(pl.Callback):
    """What is drawn first where training goes on."""

    drawn = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.drawn = float(torch.rand(1))


def save_seeded(context: RankContext, folder: str) -> None:
    save = SaveAtEnd(Path(folder) / "seeded")
    strategy = {"parallel": "ddp", "checkpoint": "sharded"}
    _trainer(context, strategy, max_epochs=1, callbacks=[SeedByRank(), save]).fit(StageLearner(StageCase(model="even")))


def draw_on(context: RankContext, folder: str) -> float:
    draw = DrawNext()
    trainer = _trainer(context, {"parallel": "ddp"}, max_epochs=2, callbacks=[draw])
    trainer.fit(StageLearner(StageCase(model="even")), ckpt_path=str(Path(folder) / "seeded"))
    return draw.drawn


@pytest.mark.parametrize("then", [pytest.param(1, marks=pytest.mark.sweep), 3])
def test_on_another_number_of_ranks_random_numbers_go_on_too(ranks: RankPool, tmp_path: Path, then: int) -> None:
    ranks.run(save_seeded, world_size=2, args=(str(tmp_path),))
    expected = ranks.run(draw_on, world_size=2, args=(str(tmp_path),))
    drawn = ranks.run(draw_on, world_size=then, args=(str(tmp_path),))
    assert drawn[:2] == expected[:then]
    assert len(set(drawn)) == then
