"""``sync=local_sgd``: what the papers say, whatever the layout and the mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.local_runs import LAYOUTS, simulate, train, workers_of
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled

AVERAGING: dict[str, Any] = {"every": 4, "outer_lr": 1.0, "outer_momentum": 0.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "averaging": AVERAGING,
    "nesterov": {"every": 3},
    "heavy ball": {"every": 3, "outer_lr": 0.5, "nesterov": False},
    "fragments": {"every": 4, "fragments": 2},
    "streaming": {"every": 4, "fragments": 2, "overlap_steps": 2},
    "replacing": {"every": 5, "overlap_steps": 3, "mixing": 0.0},
    "warm": {"every": 3, "warmup_steps": 4, "fragments": 2, "overlap_steps": 1},
    "ranks": {"every": 3, "workers": "ranks"},
}
FRAGMENTS = [0, 1, 1, 1, 1, 1]
"""Of the six parameters of the odd model: the first has about half of the bytes."""

CASES: dict[str, tuple[str, str, str, str, int]] = {
    f"{parallel}-{layout}-{options}-{optimizer}-{accumulation}": (parallel, layout, options, optimizer, accumulation)
    for parallel in ("ddp", "zero1", "zero2", "zero3")
    for layout in ("2+2", "1+1", "2+1")
    for options in OPTIONS
    for optimizer in ("sgd", "adamw")
    for accumulation in (1, 2)
    if parallel == "ddp" or (layout != "2+1" and options != "ranks")
}
ALWAYS = [
    "ddp-2+2-nesterov-sgd-1",
    "ddp-2+1-averaging-adamw-2",
    "ddp-2+2-warm-sgd-1",
    "ddp-1+1-replacing-adamw-1",
    "ddp-2+1-ranks-sgd-1",
    "zero2-2+2-streaming-adamw-1",
    "zero2-2+2-warm-sgd-2",
    "zero3-1+1-heavy ball-sgd-1",
    "zero1-2+2-fragments-sgd-2",
]


@pytest.mark.parametrize(("parallel", "layout", "options", "optimizer", "accumulation"), sampled(CASES, ALWAYS))
def test_it_is_the_algorithm_of_its_papers(
    ranks: RankPool, parallel: str, layout: str, options: str, optimizer: str, accumulation: int
) -> None:
    chosen = OPTIONS[options]
    got = ranks.run(train, layout=LAYOUTS[layout], args=(parallel, chosen, optimizer, accumulation))
    expected = simulate(
        workers_of(layout, chosen.get("workers", "hosts")),
        chosen,
        optimizer,
        accumulation,
        fragment_of=lambda index, fragments: FRAGMENTS[index] if fragments == 2 else 0,
    )
    for weights in got:
        for name, value in expected.items():
            assert torch.equal(weights[name], got[0][name]), "alike on all ranks, to the bit"
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)
