"""ZeRO-1, 2 and 3 and hybrid shards equal one process: weights, losses, optimizer state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.sharded_runs import Case, Outcome, reference, train
from tests.support.ranks import RankPool
from tests.support.reference import assert_same

LAYOUTS: dict[str, dict[str, list[int]]] = {
    "1": {"a": [0]},
    "2": {"a": [0, 1]},
    "3": {"a": [0, 1, 2]},
    "2+2": {"a": [0, 1], "b": [2, 3]},
    "3+1": {"a": [0, 1, 2], "b": [3]},
    "cyclic": {"a": [0, 2], "b": [1, 3]},
    "1+1": {"a": [0], "b": [1]},
}
MODES: dict[str, dict[str, Any]] = {
    "zero1": {"parallel": "zero1"},
    "zero2": {"parallel": "zero2"},
    "zero3": {"parallel": "zero3"},
    "hpz": {"parallel": {"mode": "zero3", "secondary_shard": "host"}},
    "hsdp": {"parallel": "hsdp"},
}
EVEN = ("1", "2", "3", "2+2", "cyclic", "1+1")


def check(outcomes: list[Outcome], case: Case, *, atol: float = 1e-6) -> None:
    """All ranks equal the reference, a few roundings of fp32 values near 1 apart; a loss may be larger, hence rtol."""
    steps = reference(case, len(outcomes))
    for rank, outcome in enumerate(outcomes):
        names = outcome.weights if rank == 0 else {n for n in outcome.weights if ".running_" not in n}
        assert_same({n: outcome.weights[n] for n in names}, {n: steps[-1].weights[n] for n in names}, atol=atol)
        expected = [loss[rank] for step in steps for loss in step.rank_losses]
        torch.testing.assert_close(torch.tensor(outcome.losses), torch.tensor(expected), rtol=3e-7, atol=atol)
        assert outcome.kinds == {"Parameter"}  # the module is whole again
    assert_same(outcomes[0].optimizer_state, steps[-1].optimizer_state, atol=atol)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_equals_one_process(ranks: RankPool, mode: str, layout: str, accumulation: int) -> None:
    if mode in ("hpz", "hsdp") and layout not in EVEN:
        pytest.skip("refused: see test_uneven_hosts_are_refused")
    optimizer = "adamw" if accumulation == 1 else "sgd"
    case = Case(optimizer=optimizer, strategy=MODES[mode], accumulation=accumulation)
    check(ranks.run(train, layout=LAYOUTS[layout], args=(case,)), case)


@pytest.mark.parametrize("net", ["tied", "frozen", "formats"])
@pytest.mark.parametrize("mode", MODES)
def test_tied_frozen_and_reused_parameters(ranks: RankPool, mode: str, net: str) -> None:
    case = Case(net=net, optimizer="two groups", strategy=MODES[mode], accumulation=2)
    check(ranks.run(train, layout=LAYOUTS["2+2"], args=(case,)), case)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_parameters_used_on_some_ranks_only_and_never(ranks: RankPool, mode: str, accumulation: int) -> None:
    parallel = MODES[mode]["parallel"]
    options = {"mode": parallel} if isinstance(parallel, str) else parallel
    case = Case(
        net="sometimes",
        optimizer="adamw",
        strategy={"parallel": {**options, "find_unused_parameters": True}},
        accumulation=accumulation,
    )
    check(ranks.run(train, layout=LAYOUTS["2+2"], args=(case,)), case)


@pytest.mark.parametrize("mode", MODES)
def test_two_forwards_before_one_backward(ranks: RankPool, mode: str) -> None:
    case = Case(strategy=MODES[mode], accumulation=2, twice=True)
    check(ranks.run(train, layout=LAYOUTS["2+2"], args=(case,)), case)


@pytest.mark.parametrize(
    "clip", [{"gradient_clip_val": 0.05}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}]
)
@pytest.mark.parametrize("mode", MODES)
def test_clipping_is_by_global_values(ranks: RankPool, mode: str, clip: dict[str, Any]) -> None:
    case = Case(strategy=MODES[mode], trainer=clip)
    check(ranks.run(train, layout=LAYOUTS["2+2"], args=(case,)), case)


@pytest.mark.parametrize("sync", [{"algorithm": "flat"}, {"chunk_bytes": 4096}])
@pytest.mark.parametrize("mode", MODES)
def test_other_ways_of_travelling(ranks: RankPool, mode: str, sync: dict[str, Any]) -> None:
    case = Case(strategy={**MODES[mode], "sync": sync})
    check(ranks.run(train, layout=LAYOUTS["cyclic"], args=(case,)), case)
