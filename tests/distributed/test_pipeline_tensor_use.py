"""What users do with a model cut into stages of split layers: evaluate, save, load, drop; and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_dist import PipelineLayer
from lightning_dist.errors import LostWeightsError, PlacementError
from tests.distributed.lightning_runs import loader_of, trainer_on_pool
from tests.distributed.pipeline_runs import (
    STEPS,
    StageCase,
    StageLearner,
    input_of,
    loss_of,
    make_batches,
    reference,
    strategy_for,
    train,
)
from tests.distributed.test_pipeline_tensor import LAYOUTS, two_by_two
from tests.distributed.test_pipeline_training import check
from tests.distributed.test_pipeline_use import evaluate, go_on, net_of, train_and_save
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
    batches = make_batches(case.model, 2, seed=50, size=3)
    net, trained = net_of(case).eval(), net_of(case, outcomes[0]["weights"]).eval()
    with torch.no_grad():
        before, after = (
            float(sum(loss_of(case, model(input_of(case, batch)), batch) for batch in batches)) / len(batches)
            for model in (net, trained)
        )
        expected = [net(input_of(case, batch)) for batch in batches]
    for outcome in outcomes:
        assert outcome["before"] == pytest.approx(before, rel=1e-5)
        assert outcome["in_fit"] == outcome["after"] == pytest.approx(after, rel=1e-5)
        torch.testing.assert_close(outcome["predictions"], expected)


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
    expected = ranks.run(train_and_save, layout=layouts[first], args=(case, first, tmp_path))
    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    names = [f"net.{name}" for name, _ in net_of(case).named_parameters(remove_duplicate=False)]
    assert list(saved["state_dict"]) == names
    tied = [saved["state_dict"][f"net.{name}.weight"] for name in ("tokens", "head")]
    assert tied[0].data_ptr() == tied[1].data_ptr()
    found = ranks.run(go_on, layout=layouts[second], args=(case, second, tmp_path / "epoch=0.ckpt"))
    for losses in found:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[0]), rtol=1e-5, atol=1e-6)


def state_in_fit(context: RankContext, case: StageCase) -> dict[str, Any]:
    """What ``state_dict`` of an inner module gives while the model is cut, what loading does, and what is held."""
    said: dict[str, Any] = {}

    class Look(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            net: Any = pl_module.net
            said["inner"] = {name: value.clone() for name, value in net.state_dict().items()}
            net.load_state_dict({name: value * 2 for name, value in said["inner"].items()})
            parts = [p._local_tensor if isinstance(p, DTensor) else p for p in set(net.parameters())]
            said["memory"] = sum(part.untyped_storage().nbytes() for part in parts)

    module = StageLearner(case)
    trainer_on_pool(context, strategy_for(case), callbacks=[Look()]).fit(module)
    said["after"] = {name: value.clone() for name, value in module.net.state_dict().items()}
    return said


def test_state_dict_is_whole_while_the_model_is_cut(ranks: RankPool) -> None:
    outcomes = ranks.run(state_in_fit, layout=HOSTS, args=(CASE,))
    size = sum(p.numel() * p.element_size() for p in net_of(CASE).parameters())
    for outcome in outcomes:
        for name, value in outcomes[0]["inner"].items():
            assert torch.equal(outcome["inner"][name], value)
            assert torch.equal(outcome["after"][name], 2 * value)
    assert sum(outcome["memory"] for outcome in outcomes) < 1.4 * size, "a rank holds its parts of its stages only"


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
