"""ZeRO-1, 2 and 3 and hybrid shards equal one process: weights, losses, optimizer state."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.distributed.sharded_runs import LAYOUTS, MODES, Case, check, in_modes, in_modes_with, train
from tests.support.pairwise import cover, pair
from tests.support.ranks import RankPool

EVEN = ("1", "2", "3", "2+2", "cyclic", "1+1")


def matrix() -> list[Any]:
    """All combinations; those that are not needed for each two values to meet belong to the sweep.

    ``zero1`` and ``hpz``, which differ little from ``zero2`` and ``zero3``, meet a few layouts always.
    """
    groups = {"mode": list(MODES), "layout": list(LAYOUTS), "accumulation": ["1", "3"]}
    uneven = [layout for layout in LAYOUTS if layout not in EVEN]
    refused = [pair(("mode", mode), ("layout", layout)) for mode in ("hpz", "hsdp") for layout in uneven]
    little = [pair(("mode", m), ("layout", n)) for m in ("zero1", "hpz") for n in LAYOUTS if n not in ("2", "cyclic")]
    sample = [tuple(row[name] for name in groups) for row in cover(groups, [*refused, *little])]
    return [
        pytest.param(mode, layout, int(accumulation), marks=() if sampled else pytest.mark.sweep)
        for mode, layout, accumulation in itertools.product(*groups.values())
        if pair(("mode", mode), ("layout", layout)) not in refused  # see test_uneven_hosts_are_refused
        for sampled in [(mode, layout, accumulation) in sample]
    ]


@pytest.mark.parametrize(("mode", "layout", "accumulation"), matrix())
def test_every_mode_equals_one_process(ranks: RankPool, mode: str, layout: str, accumulation: int) -> None:
    optimizer = "adamw" if accumulation == 1 else "sgd"
    case = Case(optimizer=optimizer, strategy=MODES[mode], accumulation=accumulation)
    check(ranks.run(train, layout=LAYOUTS[layout], args=(case,)), case)


@in_modes_with(
    "net",
    {net: net for net in ("tied", "frozen", "formats")},
    {"tied": ["zero2", "zero3"], "frozen": ["zero3", "hsdp"], "formats": ["zero2", "hsdp"]},
)
def test_tied_frozen_and_reused_parameters(ranks: RankPool, mode: str, net: str) -> None:
    case = Case(net=net, optimizer="two groups", strategy=MODES[mode], accumulation=2)
    check(ranks.run(train, layout=LAYOUTS["2+2"], args=(case,)), case)


@in_modes_with("accumulation", {"1": 1, "3": 3}, {"1": ["zero3"], "3": ["zero2", "hsdp"]})
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


@in_modes("zero2", "hsdp")
def test_two_forwards_before_one_backward(ranks: RankPool, mode: str) -> None:
    case = Case(strategy=MODES[mode], accumulation=2, twice=True)
    check(ranks.run(train, layout=LAYOUTS["2+2"], args=(case,)), case)


@in_modes_with(
    "clip",
    {
        "norm": {"gradient_clip_val": 0.05},
        "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    },
    {"norm": ["zero3", "hsdp"], "value": ["zero2"]},
)
def test_clipping_is_by_global_values(ranks: RankPool, mode: str, clip: dict[str, Any]) -> None:
    case = Case(strategy=MODES[mode], trainer=clip)
    check(ranks.run(train, layout=LAYOUTS["2+2"], args=(case,)), case)


@in_modes_with(
    "sync",
    {"flat": {"algorithm": "flat"}, "chunks": {"chunk_bytes": 4096}},
    {"flat": ["zero3", "hsdp"], "chunks": ["zero2", "hsdp"]},
)
def test_other_ways_of_travelling(ranks: RankPool, mode: str, sync: dict[str, Any]) -> None:
    case = Case(strategy={**MODES[mode], "sync": sync})
    check(ranks.run(train, layout=LAYOUTS["cyclic"], args=(case,)), case)
