"""What users do with a model cut into stages of split layers: evaluate, save, load, drop; and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist import PipelineLayer
from lightning_dist.errors import LostWeightsError, PlacementError
from tests.distributed.lightning_runs import loader_of, trainer_on_pool
from tests.distributed.pipeline_runs import (
    STEPS,
    StageCase,
    StageLearner,
    make_batches,
    reference,
    strategy_for,
    train,
)
from tests.distributed.stage_use import check_checkpoint, check_evaluation, check_state_in_fit, evaluate, state_in_fit
from tests.distributed.test_pipeline_tensor import LAYOUTS, two_by_two
from tests.distributed.test_pipeline_training import check
from tests.support.ranks import RankPool
from tests.support.reference import assert_same
from tests.support.tasks import RankContext

HOSTS = LAYOUTS["2+2"]
CASE = StageCase("even", **two_by_two(loss_parallel=True), optimizer="adamw")
ZBV = StageCase("even", **two_by_two("zbv", loss_parallel=True), optimizer="adamw")
BOTH = pytest.mark.parametrize("case", [pytest.param(CASE, marks=pytest.mark.sweep), ZBV], ids=["1f1b", "zbv"])


def test_pipelines_that_read_different_data_average_their_parts(ranks: RankPool) -> None:
    """Two pipelines of two stages on two ranks each, numbered in turn."""
    layout = {"a": [0, 2, 4, 6], "b": [1, 3, 5, 7]}
    case = dataclasses.replace(CASE, accumulation=2, trainer={"gradient_clip_val": 0.5})
    outcomes = ranks.run(train, layout=layout, args=(case,), deadline_s=120)
    assert [outcome.data_rank for outcome in outcomes] == [0, 1] * 4
    check(outcomes, case)


# -- evaluation -------------------------------------------------------------------------------------------------------


@BOTH
def test_evaluation_is_that_of_the_uncut_model(ranks: RankPool, case: StageCase) -> None:
    outcomes = ranks.run(evaluate, layout=HOSTS, args=(case,))
    check_evaluation(outcomes, case, data_ranks=(0, 0, 0, 0))


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "case"),
    [(None, None, ZBV), (None, "ddp", CASE), ("ddp", None, CASE), ("ddp", None, ZBV), (None, "tensor", ZBV)],
    ids=["same", "to_ddp", "from_ddp", "from_ddp_to_zbv", "to_tensor"],
)
def test_a_checkpoint_is_that_of_the_whole_model(
    ranks: RankPool, first: str | None, second: str | None, case: StageCase, tmp_path: Path
) -> None:
    """All ranks of the pipeline read one part of the data, and so does one rank of ddp."""
    layouts = {None: HOSTS, "ddp": {"a": [0]}, "tensor": {"a": [0, 1]}}
    check_checkpoint(ranks, case, tmp_path, first=first, second=second, layouts=layouts)


def test_state_dict_is_whole_while_the_model_is_cut(ranks: RankPool) -> None:
    check_state_in_fit(ranks.run(state_in_fit, layout=HOSTS, args=(CASE,)), CASE, most=1.4)


# -- random numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule", [*(pytest.param(name, marks=pytest.mark.sweep) for name in ("1f1b", "interleaved_zero_bubble")), "zbv"]
)
def test_with_dropout_what_is_whole_stays_alike(ranks: RankPool, schedule: str) -> None:
    """Ranks end alike, bit for bit; and so with recomputation, which draws the same masks."""
    case = StageCase("even_noisy", **two_by_two(schedule))
    outcomes = ranks.run(train, layout=HOSTS, args=(case,))
    for outcome in outcomes:
        assert_same(outcome.weights, outcomes[0].weights, atol=0)
        assert outcome.losses == outcomes[0].losses
    assert outcomes[0].losses[0] != reference(dataclasses.replace(case, model="even"), 1)[0].loss, (
        "something was dropped"
    )
    again = ranks.run(train, layout=HOSTS, args=(dataclasses.replace(case, strategy={"recompute": "full"}),))
    assert again[0].losses == outcomes[0].losses
    assert_same(again[0].weights, outcomes[0].weights, atol=0)


@BOTH
def test_a_lower_precision(ranks: RankPool, case: StageCase) -> None:
    case = dataclasses.replace(case, trainer={"precision": "bf16-mixed"})
    outcomes = ranks.run(train, layout=HOSTS, args=(case,))
    tolerance = 0.02  # bf16 has 8 bits
    assert outcomes[0].losses == pytest.approx([step.loss for step in reference(case, 1)], rel=tolerance)


# -- options, and what is refused -------------------------------------------------------------------------------------


class OwnData(StageLearner):
    """Ranks that share layers read different data."""

    def train_dataloader(self) -> Any:
        return loader_of(make_batches("even", STEPS, seed=self.trainer.local_rank, size=8))


class Inside(StageLearner):
    """A boundary between two stages lies between a column layer and its row layer."""

    def pipeline_layers(self) -> Any:
        layers = self.net.pipeline_layers()
        last = self.net.blocks[3]

        def up(x: Tensor) -> tuple[Tensor, Tensor]:
            x = x + last.attention(last.norm1(x))
            return x, nn.functional.gelu(last.up(last.norm2(x)))

        halves = [
            PipelineLayer(up, last.norm1, last.attention, last.norm2, last.up),
            PipelineLayer(lambda x, y: x + last.down(y), last.down),
        ]
        return [*layers[:4], *halves, layers[5]]


class Early(StageLearner):
    """Lists its parameters before they are split."""

    def __init__(self, case: StageCase) -> None:
        super().__init__(case)
        self.listed = list(self.net.parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.listed, lr=0.1)


def tried(context: RankContext, kind: type[StageLearner], case: StageCase) -> tuple[str, str, bool]:
    """How a fit ended, and whether the model can be used afterwards."""
    module, error = kind(case), ""
    trainer = trainer_on_pool(context, strategy_for(case), limit_val_batches=0)
    try:
        trainer.fit(module)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    try:
        module.net(torch.zeros(1, 2, dtype=torch.long))
    except LostWeightsError:
        module.load_state_dict(kind(case).state_dict())
        assert torch.isfinite(module.net(torch.zeros(1, 2, dtype=torch.long))).all()
        return error, "lost", False
    return error, "whole", all(type(p).__name__ == "Parameter" and p.numel() for p in module.net.parameters())


REFUSED: dict[str, tuple[type[StageLearner], dict[str, Any], str, str]] = {
    "data": (OwnData, {}, "belong to one pipeline, so they must read the same batches", "lost"),
    "inside": (Inside, {"split": [5, 2]}, "ends behind net.blocks.3.up", "lost"),
    "early": (Early, {}, "as it was before its layer was split", "lost"),
    "few_layers": (
        StageLearner,
        {"schedule": "interleaved_1f1b", "virtual_stages": 4},
        "layers cannot make 8",
        "whole",
    ),
}


@pytest.mark.parametrize(("kind", "pipeline", "said", "left"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_by_name(
    ranks: RankPool, kind: type[StageLearner], pipeline: dict[str, Any], said: str, left: str
) -> None:
    case = dataclasses.replace(CASE, pipeline={**CASE.pipeline, **pipeline})
    for error, state, is_whole in ranks.run(tried, layout=HOSTS, args=(kind, case), fresh=True):
        assert said in error
        assert state == left
        assert is_whole == (left == "whole")


def test_a_plan_that_does_not_fit_changes_nothing(ranks: RankPool) -> None:
    case = dataclasses.replace(CASE, parallel={"tensor": {"size": 2, "plan": {"*.nothing": "row"}}})
    for error, _, is_whole in ranks.run(tried, layout=HOSTS, args=(StageLearner, case)):
        assert "nothing" in error
        assert is_whole


class Timed(StageLearner):
    """Has an input to time its layers on."""

    def __init__(self, case: StageCase) -> None:
        super().__init__(case)
        self.example_input_array = torch.zeros(2, 3, dtype=torch.long)


def test_layers_are_timed_whole(ranks: RankPool) -> None:
    case = dataclasses.replace(CASE, pipeline={**CASE.pipeline, "balance": "time"})
    for error, _, is_whole in ranks.run(tried, layout=HOSTS, args=(Timed, case)):
        assert error == ""
        assert is_whole


def misplaced(context: RankContext, case: StageCase) -> None:
    trainer_on_pool(context, strategy_for(case), limit_val_batches=0).fit(StageLearner(case))


def refused(context: RankContext, case: StageCase, said: str) -> None:
    with pytest.raises(PlacementError, match=said):
        misplaced(context, case)


@pytest.mark.parametrize(
    ("layout", "options", "said"),
    [
        ({"a": [0, 1, 2], "b": [3]}, {}, r"tp must stay inside a host, but tp groups cross hosts: \[2, 3\] on a, b"),
        ({"a": [0, 2], "b": [1, 3]}, {"placement": "rank_order"}, r"Write parallel.pipeline.placement=auto"),
        ({"a": [0, 1]}, {}, r"2 ranks do not make pipelines of 2 stages of 2 ranks that share layers"),
    ],
    ids=["3+1", "rank_order", "too_few"],
)
def test_ranks_that_share_layers_must_sit_on_one_host(
    ranks: RankPool, layout: dict[str, list[int]], options: dict[str, Any], said: str
) -> None:
    case = dataclasses.replace(CASE, pipeline={**CASE.pipeline, **options})
    ranks.run(refused, layout=layout, args=(case, said))


def test_one_stage_is_tensor_parallelism(ranks: RankPool) -> None:
    """Without a size the ranks of a host make the pipeline: here one stage, on both of them."""
    case = StageCase("even", pipeline={"micro_batches": 4}, parallel={"tensor": {"size": 2}})
    outcomes = ranks.run(train, world_size=2, args=(case,))
    check(outcomes, case)
