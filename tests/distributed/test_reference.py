"""Each way of synchronising, through Lightning, against one process in fp32."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.distributed.lightning_runs import (
    OddModule,
    adamw,
    loader_of,
    make_batches,
    mse,
    odd_model,
    sgd,
    strategy_of,
    trainer_on_pool,
)
from tests.support.pairwise import cover
from tests.support.ranks import RankPool
from tests.support.reference import assert_same, optimizer_state_by_name, train_reference
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

LAYOUTS: dict[str, dict[str, list[int]]] = {
    "1": {"a": [0]},
    "2": {"a": [0, 1]},
    "2+2": {"a": [0, 1], "b": [2, 3]},
    "3+1": {"a": [0, 1, 2], "b": [3]},
    "cyclic": {"a": [0, 2], "b": [1, 3]},
    "4x2": {"a": [0, 1], "b": [2, 3], "c": [4, 5], "d": [6, 7]},
}
OPTIMIZERS = {"sgd": sgd, "adamw": adamw}
MICRO_BATCHES = 7  # with accumulation 3: two full windows and a short one


def train(context: RankContext, sync: dict[str, Any], optimizer: str, arguments: dict[str, Any]) -> dict[str, Any]:
    module = OddModule(OPTIMIZERS[optimizer])
    trainer = trainer_on_pool(context, strategy_of(sync=sync), **arguments)
    batches = make_batches(context.world_size, MICRO_BATCHES)[context.rank]
    trainer.fit(module, loader_of(batches))
    state = optimizer_state_by_name(module.net, trainer.optimizers[0])
    return {"losses": module.losses, "weights": module.net.state_dict(), "optimizer": state}


def matrix() -> list[Any]:
    """All combinations; each two values meet in those that run always."""
    groups = {
        "name": list(LAYOUTS),
        "algorithm": ["flat", "hierarchical"],
        "optimizer": list(OPTIMIZERS),
        "accumulation": ["1", "3"],
    }
    cases = {
        f"{name}-{algorithm}-{optimizer}-{accumulation}": (name, algorithm, optimizer, int(accumulation))
        for name, algorithm, optimizer, accumulation in itertools.product(*groups.values())
    }
    return sampled(cases, ["-".join(row[group] for group in groups) for row in cover(groups)])


@pytest.mark.parametrize(("name", "algorithm", "optimizer", "accumulation"), matrix())
def test_training_equals_one_process(
    ranks: RankPool, name: str, algorithm: str, optimizer: str, accumulation: int
) -> None:
    check(ranks, LAYOUTS[name], {"algorithm": algorithm}, optimizer, accumulation=accumulation)


@pytest.mark.parametrize("clipping", [{"clip_norm": 0.05}, {"clip_value": 0.01}], ids=["norm", "value"])
def test_clipping_is_by_the_mean_gradient(ranks: RankPool, clipping: dict[str, float]) -> None:
    check(ranks, LAYOUTS["3+1"], {}, "sgd", accumulation=1, **clipping)


def test_bf16_on_the_wire_stays_close(ranks: RankPool) -> None:
    """Each gradient is rounded once to 8 bits of mantissa on its way out and once on its way back."""
    check(ranks, LAYOUTS["2+2"], {"codec": "bf16"}, "sgd", accumulation=1, atol=5e-3)


def check(
    ranks: RankPool,
    layout: dict[str, list[int]],
    sync: dict[str, Any],
    optimizer: str,
    *,
    accumulation: int,
    atol: float = 1e-6,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> None:
    world_size = sum(len(ranks_of_host) for ranks_of_host in layout.values())
    reference = train_reference(
        make_model=odd_model,
        make_optimizer=OPTIMIZERS[optimizer],
        batches=make_batches(world_size, MICRO_BATCHES),
        loss_of=mse,
        accumulation=accumulation,
        clip_norm=clip_norm,
        clip_value=clip_value,
    )
    arguments: dict[str, Any] = {"accumulate_grad_batches": accumulation}
    if clip_norm is not None or clip_value is not None:
        arguments["gradient_clip_val"] = clip_norm if clip_norm is not None else clip_value
        arguments["gradient_clip_algorithm"] = "norm" if clip_norm is not None else "value"
    got = ranks.run(train, layout=layout, args=(sync, optimizer, arguments))
    for rank, result in enumerate(got):
        assert_same(result["weights"], reference[-1].weights, atol=atol)
        assert_same(result["optimizer"], reference[-1].optimizer_state, atol=atol)
        expected = [losses[rank] for step in reference for losses in step.rank_losses]
        torch.testing.assert_close(torch.tensor(result["losses"]), torch.tensor(expected), rtol=0, atol=atol)
        for weights, first in zip(result["weights"].values(), got[0]["weights"].values(), strict=True):
            assert torch.equal(weights, first), "weights differ between ranks"
