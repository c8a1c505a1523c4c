"""Modules whose layers are split, through a Trainer: numbers of one process, alone and inside shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.tensor_runs import SplitCase, SplitOutcome, reference, train
from tests.support.ranks import RankPool
from tests.support.reference import assert_same

LAYOUTS: dict[str, dict[str, list[int]]] = {
    "2": {"a": [0, 1]},
    "4": {"a": [0, 1, 2, 3]},
    "2+2": {"a": [0, 1], "b": [2, 3]},
    "cyclic": {"a": [0, 2], "b": [1, 3]},
}
DATA_RANKS = {"2": [0, 0], "4": [0, 0, 1, 1], "2+2": [0, 0, 1, 1], "cyclic": [0, 1, 0, 1]}
TENSOR: dict[str, Any] = {"mode": "tensor"}


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


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        ("2", SplitCase(optimizer="adamw")),
        ("2", SplitCase(accumulation=3, parallel={**TENSOR, "tensor": {"loss_parallel": True}})),
        ("2+2", SplitCase(accumulation=3, sync={"bucket_bytes": 1024, "chunk_bytes": 4096})),
        ("cyclic", SplitCase("huggingface", "adamw")),
        ("4", SplitCase(parallel=inside("tensor"), sync={"algorithm": "flat"})),
        ("2", SplitCase(parallel=inside("zero2"))),
        ("2+2", SplitCase("huggingface", "adamw", parallel=inside("zero1"), accumulation=3)),
        ("2+2", SplitCase(optimizer="adamw", parallel=inside("zero2"), accumulation=3)),
        ("cyclic", SplitCase(optimizer="adamw", parallel=inside("zero3"), accumulation=3)),
        ("2+2", SplitCase("huggingface", parallel=inside("zero3", prefetch=2))),
        ("2+2", SplitCase(optimizer="adamw", parallel=inside("hsdp"))),
        ("4", SplitCase(parallel=inside("hsdp"), accumulation=3)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.parallel['mode']}-{value.optimizer}-{value.model}",
)
def test_equals_one_process(ranks: RankPool, layout: str, case: SplitCase) -> None:
    check(ranks.run(train, layout=LAYOUTS[layout], args=(case,)), case, layout)
