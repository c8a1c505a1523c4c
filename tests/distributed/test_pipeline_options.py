"""Pipelines with recomputation, precisions, placements; what they print and what they keep in memory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_dist import PipelinePicture
from lightning_dist.errors import CombinationError
from tests.distributed.lightning_runs import trainer_on_pool
from tests.distributed.pipeline_runs import StageCase, StageLearner, reference, strategy_for, train
from tests.support.ranks import RankPool
from tests.support.reference import assert_same
from tests.support.tasks import RankContext

HOSTS = {"a": [0, 1], "b": [2, 3]}
SCHEDULES = ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [(schedule, how) for schedule in SCHEDULES for how in ("full", "every_n")]
    + [("1f1b", "selective"), ("interleaved_1f1b", "selective")],
)
def test_recomputation_changes_nothing(ranks: RankPool, schedule: str, recompute: str) -> None:
    """With dropout, and micro-batches that interleave: the masks are the same, so the weights are, bit for bit."""
    case = StageCase("noisy", pipeline={"schedule": schedule, "micro_batches": 4})
    plain = ranks.run(train, world_size=2, args=(case,))
    again = ranks.run(train, world_size=2, args=(dataclasses.replace(case, strategy={"recompute": recompute}),))
    assert again[0].losses == plain[0].losses
    assert_same(again[0].weights, plain[0].weights, atol=0)
    assert plain[0].losses[0] != reference(dataclasses.replace(case, model="gpt"), 1)[0].loss, "something was dropped"


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_lower_precisions(ranks: RankPool, precision: str) -> None:
    case = StageCase("gpt", pipeline={"schedule": "1f1b", "micro_batches": 4}, trainer={"precision": precision})
    outcomes = ranks.run(train, world_size=2, args=(case,))
    steps = reference(case, 1)
    tolerance = 0.02  # bf16 has 8 bits
    assert outcomes[0].losses == pytest.approx([step.loss for step in steps], rel=tolerance)
    kinds = {value.dtype for value in outcomes[0].weights.values()}
    assert kinds == {torch.float32 if precision == "bf16-mixed" else torch.bfloat16}


def test_batch_norm_sees_micro_batches_and_follows_the_first_pipeline(ranks: RankPool) -> None:
    case = StageCase("batch_norm", pipeline={"micro_batches": 4, "size": 2})
    outcomes = ranks.run(train, layout=HOSTS, args=(case,))
    for (
        outcome
    ) in outcomes:  # statistics are those of the own pipeline's last batch, as under ddp those of the own rank
        names = [name for name in outcome.weights if "running" not in name or outcome.data_rank == 0]
        chosen = [{name: each.weights[name] for name in names} for each in (outcome, outcomes[0])]
        assert_same(*chosen, atol=0)
    assert int(outcomes[0].weights["1.num_batches_tracked"]) == 4 * 4


def test_a_selective_recomputation_of_backwards_in_two_parts_is_refused() -> None:
    with pytest.raises(CombinationError, match="write recompute=full, or parallel"):
        strategy_for(StageCase(pipeline={"schedule": "zbv"}, strategy={"recompute": "selective"}))


def test_a_budget_for_recomputation_is_refused() -> None:
    with pytest.raises(CombinationError, match="recompute=budget with pipeline stages"):
        strategy_for(StageCase(strategy={"recompute": {"mode": "budget", "budget": "1GB"}}))


# -- memory -----------------------------------------------------------------------------------------------------------


class Counted(nn.Module):
    """Counts how many of its outputs are alive at most."""

    alive, most = 0, 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if torch.is_grad_enabled():
            type(self).alive += 1
            type(self).most = max(type(self).most, type(self).alive)
            y.register_hook(self._gone)
        return y

    def _gone(self, gradient: Tensor) -> None:
        type(self).alive -= 1


class Deep(StageLearner):
    def __init__(self, case: StageCase) -> None:
        super().__init__(case)
        self.net = nn.Sequential(*(Counted() for _ in range(4)), nn.Linear(7, 3))


def most_alive(context: RankContext, case: StageCase) -> int:
    Counted.alive = Counted.most = 0
    trainer_on_pool(context, strategy_for(case), limit_val_batches=0).fit(Deep(case))
    return Counted.most - Counted.alive  # the trial by which a stage learns shapes has no backward


@pytest.mark.parametrize(("schedule", "most"), [("1f1b", [4, 3, 2, 1]), ("gpipe", [16] * 4)])
def test_1f1b_keeps_activations_of_stages_not_of_micro_batches(ranks: RankPool, schedule: str, most: list[int]) -> None:
    case = StageCase(pipeline={"schedule": schedule, "micro_batches": 16, "split": [1, 1, 1, 2]}, size=16)
    assert ranks.run(most_alive, world_size=4, args=(case,)) == most


# -- what is said -----------------------------------------------------------------------------------------------------


def say(context: RankContext, case: StageCase, folder: Path) -> list[str]:
    """What rank 0 prints and warns of."""
    import logging
    import warnings

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_on_pool(
            context, strategy_for(case), limit_val_batches=0, callbacks=[PipelinePicture(folder)], max_epochs=2
        )
        trainer.fit(StageLearner(case))
    return said + [str(warning.message) for warning in caught]


def test_placement_boundaries_and_idle_shares_are_said(ranks: RankPool, tmp_path: Path) -> None:
    case = StageCase(pipeline={"size": 4, "micro_batches": 4, "placement": "rank_order"})
    said = "\n".join(ranks.run(say, layout={"a": [0, 2], "b": [1, 3]}, args=(case, tmp_path))[0])
    assert "1 pipeline of 4 ranks, schedule 1f1b, up to 4 micro-batches, split by parameters" in said
    assert "stage 0 on rank 0: net.0" in said
    assert "stage 0 -> 1 (world):" in said
    assert "puts 3 boundaries between stages across hosts, and 1 are enough" in said
    assert "on ranks [0, 2, 1, 3]: write parallel.pipeline.placement=auto" in said
    assert "micro-batches: idle" in said
    assert "(formula 42.9%;" in said
    numbers: dict[str, Any] = json.loads((tmp_path / "pipeline.json").read_text())
    assert [rank["stages"] for rank in numbers["ranks"]] == [[0], [1], [2], [3]]
    assert 0 < numbers["idle_share"] < 1
    assert numbers["batches"] == 8 - 2
    page = (tmp_path / "pipeline.html").read_text()
    assert page.count("<title>forward, stage ") == 4 * 4 + 4  # and the loss
    assert page.count("<title>backward, stage ") == 4 * 4


def test_bytes_of_a_boundary_are_those_of_its_tensors(ranks: RankPool, tmp_path: Path) -> None:
    case = StageCase(pipeline={"micro_batches": 4, "split": [4, 5]})
    said = "\n".join(ranks.run(say, world_size=2, args=(case, tmp_path))[0])
    assert "stage 0 -> 1 (host): 0.00 MB of activations" in said


class Example(StageLearner):
    """Its second layer takes the time of all others."""

    def __init__(self, case: StageCase) -> None:
        super().__init__(case)
        self.example_input_array = torch.zeros(8, 7)
        self.net = nn.Sequential(nn.Linear(7, 7), Sleeps(), *(nn.Linear(7, 7) for _ in range(3)), nn.Linear(7, 3))


class Sleeps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        import time

        time.sleep(0.02)
        return x * 1.0


def split_of(context: RankContext, case: StageCase) -> tuple[int, ...]:
    found: list[tuple[int, ...]] = []

    class Look(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            found.append(trainer.strategy._mode._staged.cut.counts)  # type: ignore[union-attr]

    trainer = trainer_on_pool(context, strategy_for(case), limit_val_batches=0, callbacks=[Look()])
    trainer.fit(Example(case))
    return found[0]


def test_layers_are_dealt_by_measured_time(ranks: RankPool) -> None:
    case = StageCase(pipeline={"micro_batches": 4, "balance": "time"})
    assert ranks.run(split_of, world_size=2, args=(case,)) == [(2, 4)] * 2
