"""What a resumed run has of the one before: its losses, its best checkpoint, its hyperparameters, its clock."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, model_checkpoint
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_dist import AsyncShardedCheckpoint, load_from_checkpoint
from lightning_dist.checkpoint.catalog import survey
from lightning_dist.checkpoint.storage import open_folder
from tests.distributed.lightning_runs import ListDataset, strategy_of, trainer_on_pool
from tests.distributed.pipeline_runs import StageCase, StageLearner, make_batches
from tests.distributed.sharded_runs import LAYOUTS
from tests.distributed.test_checkpoint_layouts import STRATEGIES
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

CASE = StageCase(model="even", optimizer="adamw")


def _trainer(context: RankContext, name: str, *callbacks: pl.Callback, **arguments: Any) -> pl.Trainer:
    strategy = strategy_of(**STRATEGIES[name], checkpoint="async_sharded")
    keeps = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    settings = {"limit_val_batches": 0, "enable_checkpointing": keeps, **arguments}
    return trainer_on_pool(context, strategy, callbacks=list(callbacks), **settings)


# -- the next losses ---------------------------------------------------------------------------------------------------

DONE, NEXT = 3, 5
CHAIN = ("zero3", "ddp", "pipeline", "zero1")


class SameSteps(StageLearner):
    """Its steps have the same samples under every layout: eight of them, dealt to those who read."""

    def train_dataloader(self) -> Any:
        part = self.trainer.distributed_sampler_kwargs
        self.data_rank, replicas = int(part["rank"]), int(part["num_replicas"])
        steps = make_batches(CASE.model, DONE + NEXT, seed=1, size=8)
        return StatefulDataLoader(ListDataset([step[self.data_rank :: replicas] for step in steps]), batch_size=None)


def losses_in_each_layout(context: RankContext, folder: str) -> list[tuple[dict[int, list[float]], ...]]:
    """For each two neighbours: data rank -> the next losses of the run that was not interrupted, and of the other."""
    found, straight = [], {}
    for number, name in enumerate(CHAIN):
        if number:
            resumed = SameSteps(CASE)
            path = f"{folder}/{number - 1}/step={DONE}.ckpt"
            _trainer(context, name, max_epochs=1).fit(resumed, ckpt_path=path)
            found.append((straight, {resumed.data_rank: [each["loss"] for each in resumed.seen]}))
        if number < len(CHAIN) - 1:
            keep = AsyncShardedCheckpoint(
                f"{folder}/{number}", filename="{step}", every_n_train_steps=DONE, save_top_k=-1
            )
            module = SameSteps(CASE)
            _trainer(context, name, keep, max_epochs=1).fit(module)
            straight = {module.data_rank: [each["loss"] for each in module.seen[DONE:]]}
    return found


def test_the_next_five_losses_equal_those_of_the_uninterrupted_run(ranks: RankPool, tmp_path: Path) -> None:
    """In each neighbour layout. Sums are taken in another order there, so that the last bits of fp32 may differ."""

    def of_steps(parts: list[dict[int, list[float]]]) -> torch.Tensor:
        by_data_rank = {rank: losses for part in parts for rank, losses in part.items()}
        return torch.tensor(list(by_data_rank.values()), dtype=torch.float64).mean(0)

    got = ranks.run(losses_in_each_layout, layout=LAYOUTS["2+2"], args=(str(tmp_path),), deadline_s=110, fresh=True)
    for number, pairs in enumerate(zip(*got, strict=True)):
        straight, resumed = (of_steps([pair[which] for pair in pairs]) for which in (0, 1))
        assert len(set(straight.tolist())) == NEXT, "they tell steps apart"
        assert resumed.tolist() == pytest.approx(straight.tolist(), rel=1e-6, abs=0.0), CHAIN[number : number + 2]


# -- the best ----------------------------------------------------------------------------------------------------------


class Noted(pl.Callback):
    """What a callback of checkpoints knows when training starts."""

    def __init__(self, keep: ModelCheckpoint) -> None:
        self.keep = keep
        self.known: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.known.append(known_to(self.keep))


def known_to(keep: ModelCheckpoint) -> tuple[Any, ...]:
    scores = {path: float(score) for path, score in keep.best_k_models.items()}
    assert keep.best_model_score is not None
    return keep.best_model_path, float(keep.best_model_score), scores, keep.kth_best_model_path, keep.last_model_path


def resume_with_the_best(context: RankContext, folder: str, first: str, then: str) -> list[Any]:
    """Two epochs, and two more by another layout: what is known at the end, at the start, at the end."""

    def keeping() -> AsyncShardedCheckpoint:
        return AsyncShardedCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True)

    options: dict[str, Any] = {"limit_train_batches": 2, "limit_val_batches": 2}
    keep, again = keeping(), keeping()
    _trainer(context, first, keep, max_epochs=2, **options).fit(StageLearner(CASE))
    noted = Noted(again)
    _trainer(context, then, again, noted, max_epochs=4, **options).fit(StageLearner(CASE), ckpt_path="last")
    return [known_to(keep), noted.known[0], known_to(again)]


@pytest.mark.parametrize(
    ("first", "then"), [("zero2", "ddp"), pytest.param("pipeline", "zero3", marks=pytest.mark.sweep)]
)
def test_all_ranks_know_the_same_best_after_a_resume(ranks: RankPool, tmp_path: Path, first: str, then: str) -> None:
    folder = str(tmp_path / "kept")
    one, other = ranks.run(resume_with_the_best, world_size=2, args=(folder, first, then), fresh=True)
    assert one == other
    before, at_start, at_end = one
    assert at_start[:2] == before[:2]
    assert at_end[0] == min(at_end[2], key=at_end[2].get)
    problems = {f"{folder}/{entry.name}": entry.problem for entry in survey(open_folder(folder), full=True)}
    assert problems[at_end[0]] is None


# -- the clock ---------------------------------------------------------------------------------------------------------


class Paced(pl.Callback):
    """Steps that take each rank another time, by a clock of its own."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.now_s = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self.now_s += self.step_s


def save_by_the_clock(context: RankContext, folder: str, name: str) -> list[int]:
    """A checkpoint each 5 s, where a step takes rank 0 two seconds, and rank 1 none."""
    pace, saved = Paced(0.0 if context.rank else 2.0), []

    class Noting(ModelCheckpoint):
        def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
            saved.append(trainer.global_step)
            super()._save_checkpoint(trainer, filepath)

    keep = Noting(folder, filename="{step}", save_top_k=-1, train_time_interval=timedelta(seconds=5))
    with patch.object(model_checkpoint.time, "monotonic", lambda: pace.now_s):
        _trainer(context, name, pace, keep, max_epochs=3).fit(StageLearner(CASE))
    return saved


@pytest.mark.parametrize("name", ["zero2", *(pytest.param(n, marks=pytest.mark.sweep) for n in ("ddp", "pipeline"))])
def test_ranks_save_at_the_same_steps_by_the_clock_of_rank_0(ranks: RankPool, tmp_path: Path, name: str) -> None:
    one, other = ranks.run(save_by_the_clock, world_size=2, args=(str(tmp_path / "kept"), name))
    assert one == other == [3, 6, 9, 12]
    found = survey(open_folder(tmp_path / "kept"), full=True)
    assert {entry.name: entry.problem for entry in found} == {f"step={step}.ckpt": None for step in one}


# -- hyperparameters ---------------------------------------------------------------------------------------------------


class Described(StageLearner):
    """Made of a width and a depth, which it saves."""

    def __init__(self, width: int, *, depth: int = 1, name: str = "plain") -> None:
        super().__init__(StageCase())
        self.save_hyperparameters()
        layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.Tanh())]
        self.net = torch.nn.Sequential(torch.nn.Linear(7, width), *layers, torch.nn.Linear(width, 3))


def train_described(context: RankContext, folder: str) -> dict[str, torch.Tensor]:
    module = Described(6, depth=2, name="deep")
    keep = AsyncShardedCheckpoint(folder, filename="once")
    _trainer(context, "zero3", keep, max_epochs=1).fit(module)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def test_a_module_is_made_again_without_arguments(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(train_described, world_size=2, args=(str(tmp_path),), fresh=True)[0]
    module = load_from_checkpoint(Described, tmp_path / "once.ckpt")
    assert dict(module.hparams) == {"width": 6, "depth": 2, "name": "deep"}
    assert module.state_dict().keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(module.state_dict()[name], value), name
    renamed = load_from_checkpoint(Described, tmp_path / "once.ckpt", name="other")
    assert renamed.hparams["name"] == "other", "what is given goes before what was saved"
