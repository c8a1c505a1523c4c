"""Modules whose layers are split, through a Trainer: numbers of one process, alone and inside shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_dist.errors import UnusedParametersError
from tests.distributed.lightning_runs import trainer_on_pool
from tests.distributed.split_models import MODELS, loss_of, make_batches, make_optimizer
from tests.distributed.tensor_runs import SplitCase, SplitLearner, SplitOutcome, reference, strategy_for, train
from tests.support.ranks import RankPool
from tests.support.reference import assert_same, train_reference
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

LAYOUTS: dict[str, dict[str, list[int]]] = {
    "2": {"a": [0, 1]},
    "4": {"a": [0, 1, 2, 3]},
    "2+2": {"a": [0, 1], "b": [2, 3]},
    "cyclic": {"a": [0, 2], "b": [1, 3]},
}
DATA_RANKS = {"2": [0, 0], "4": [0, 0, 1, 1], "2+2": [0, 0, 1, 1], "cyclic": [0, 1, 0, 1]}
TENSOR: dict[str, Any] = {"mode": "tensor"}
BY_VALUE = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}


def inside(mode: str, **options: Any) -> dict[str, Any]:
    return {"mode": mode, "tensor": {"size": 2}, **options}


def check(outcomes: list[SplitOutcome], case: SplitCase, layout: str, *, atol: float = 1e-6) -> None:
    """All ranks equal the reference, a few roundings of fp32 values near 1 apart; losses are larger, hence rtol."""
    assert [outcome.data_rank for outcome in outcomes] == DATA_RANKS[layout]
    steps = reference(case, 1 + max(DATA_RANKS[layout]))
    for outcome in outcomes:
        expected = [loss[outcome.data_rank] for step in steps for loss in step.rank_losses]
        torch.testing.assert_close(torch.tensor(outcome.losses), torch.tensor(expected), rtol=1e-6, atol=atol)
        assert_same(outcome.weights, steps[-1].weights, atol=atol)
        assert outcome.kinds == {"Parameter"}  # the module is whole again
    # Squared gradients, of up to 10, are summed in it.
    assert_same(outcomes[0].optimizer_state, steps[-1].optimizer_state, atol=10 * atol)


BY_NORM = {"gradient_clip_val": 0.5}
CASES = {
    "tensor-2": ("2", SplitCase(optimizer="adamw", trainer=BY_NORM)),
    "tensor-2-loss_parallel": ("2", SplitCase(accumulation=3, parallel={**TENSOR, "tensor": {"loss_parallel": True}})),
    "tensor-2+2-small_buckets": (
        "2+2",
        SplitCase(accumulation=3, sync={"bucket_bytes": 1024, "chunk_bytes": 4096}, trainer=BY_VALUE),
    ),
    "tensor-cyclic": ("cyclic", SplitCase("huggingface", "adamw", trainer=BY_NORM)),
    "zero1-2+2": ("2+2", SplitCase("huggingface", "adamw", parallel=inside("zero1"), accumulation=3)),
    "zero2-2+2-fused": ("2+2", SplitCase(optimizer="fused", parallel=inside("zero2"), accumulation=3)),
    "zero3-cyclic": ("cyclic", SplitCase(optimizer="adamw", parallel=inside("zero3"), accumulation=3, trainer=BY_NORM)),
    "hsdp-2+2": ("2+2", SplitCase("huggingface", parallel=inside("hsdp"), trainer=BY_VALUE)),
    "hsdp-4": ("4", SplitCase(parallel=inside("hsdp"), accumulation=3, trainer=BY_NORM)),
}


@pytest.mark.parametrize(("layout", "case"), sampled(CASES, [name for name in CASES if name != "hsdp-4"]))
def test_equals_one_process(ranks: RankPool, layout: str, case: SplitCase) -> None:
    check(ranks.run(train, layout=LAYOUTS[layout], args=(case,)), case, layout)


def test_with_dropout_what_is_whole_stays_alike(ranks: RankPool) -> None:
    case = SplitCase("noisy")
    outcomes = ranks.run(train, layout=LAYOUTS["2+2"], args=(case,))
    for outcome in outcomes:
        assert_same(outcome.weights, outcomes[0].weights, atol=0)
    assert outcomes[0].losses == outcomes[1].losses, "ranks that share layers see the same activations"
    assert outcomes[0].losses[0] != reference(SplitCase("gpt"), 1)[0].rank_losses[0][0], "something was dropped"


# -- parameters used sometimes, thawed, and trained by hand -----------------------------------------------------------


class SometimesNet(nn.Module):
    """Two blocks, the second used where the first input is positive, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 7)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks[0](x)
        return y + self.blocks[1](y) if x[0, 0] > 0 else y


class Sometimes(SplitLearner):
    def __init__(self, case: SplitCase) -> None:
        super().__init__(case)
        torch.manual_seed(0)
        self.net = SometimesNet()


class ByHand(SplitLearner):
    """One optimizer, by hand; gradients of two micro-batches are summed."""

    def __init__(self, case: SplitCase) -> None:
        super().__init__(case)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss = loss_of(self.net, batch)
        self.losses.append(float(loss.detach()))
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


class Thawing(SplitLearner):
    """Its first block and the embedding join in after two steps."""

    def __init__(self, case: SplitCase) -> None:
        super().__init__(case)
        self.late = [*self.net.blocks[0].parameters(), self.net.positions.weight]
        for parameter in self.late:
            parameter.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            for parameter in (*self.net.blocks[0].parameters(), self.net.positions.weight):
                parameter.requires_grad_(True)


KINDS = {"sometimes": Sometimes, "by hand": ByHand, "thawing": Thawing}


def train_kind(context: RankContext, kind: str, case: SplitCase) -> dict[str, Any]:
    module = KINDS[kind](case)
    trainer = trainer_on_pool(context, strategy_for(case), limit_val_batches=0)
    error = ""
    try:
        trainer.fit(module)
    except UnusedParametersError as caught:
        error = str(caught)
    return {"weights": module.net.state_dict() if not error else {}, "losses": module.losses, "error": error}


@pytest.mark.parametrize("mode", ["tensor", "zero3"])
def test_parameters_used_on_some_ranks_only_and_never(ranks: RankPool, mode: str) -> None:
    case = SplitCase("mlp", "adamw", parallel=inside(mode, find_unused_parameters=True, uneven_inputs="off"))
    steps = train_reference(
        make_model=SometimesNet,
        make_optimizer=lambda parameters: make_optimizer(case.optimizer, parameters),
        batches=[make_batches("mlp", 6, seed=rank) for rank in range(2)],
        loss_of=loss_of,
    )
    for result in ranks.run(train_kind, layout=LAYOUTS["2+2"], args=("sometimes", case)):
        assert result["error"] == ""
        assert_same(result["weights"], steps[-1].weights, atol=1e-6)


def test_unused_parameters_are_named(ranks: RankPool) -> None:
    said = ranks.run(train_kind, layout=LAYOUTS["2+2"], args=("sometimes", SplitCase("mlp")), fresh=True)
    assert any("net.blocks.2.0.weight" in result["error"] for result in said), said


def test_by_hand_equals_one_process(ranks: RankPool) -> None:
    case = SplitCase(accumulation=2)
    steps = reference(case, 2)[:3]
    for result in ranks.run(train_kind, layout=LAYOUTS["2+2"], args=("by hand", SplitCase(accumulation=1))):
        assert_same(result["weights"], steps[-1].weights, atol=1e-6)


def test_parameters_thawed_later_are_averaged(ranks: RankPool) -> None:
    results = ranks.run(train_kind, layout=LAYOUTS["2+2"], args=("thawing", SplitCase()))
    torch.manual_seed(0)
    start = MODELS["gpt"]().state_dict()
    for result in results:
        assert_same(result["weights"], results[0]["weights"], atol=0)
        assert not torch.equal(result["weights"]["positions.weight"], start["positions.weight"])
