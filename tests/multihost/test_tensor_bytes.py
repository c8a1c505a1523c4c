"""Bytes on each host's link of one optimizer step where the ranks of each host share layers, against the formulas.

What ranks that share layers send each other (activations) stays inside the host. What crosses are the parts: each rank
averages, gathers or sums its own with the rank of the other host that holds the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dist.laws import ring_reduce_scatter_bytes
from tests.distributed.lightning_runs import loader_of, strategy_of, trainer_on_pool
from tests.distributed.test_tensor_training import TENSOR, inside
from tests.multihost.test_bytes import LAYOUTS
from tests.multihost.test_sharded_bytes import PASSES, STEPS, Wide
from tests.multihost.traffic import Sent, assert_sent, least_step
from tests.support.cluster import NamespaceCluster
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

WIDTH, HIDDEN, BLOCKS, SHARING = 128, 512, 4, 2
PART = BLOCKS * (2 * WIDTH * HIDDEN // SHARING + HIDDEN // SHARING + WIDTH)
"""Values a rank holds: half of each matrix and of the inner biases, and the outer biases, which are whole."""
ROWS = 512
"""Activations of a layer are as large as a matrix of it: they would show on the link."""


class WideBlocks(Wide):
    """Counts as :class:`Wide` does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential()
        self.net.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(BLOCKS))
        )


def count_step(context: RankContext, parallel: dict[str, Any], accumulation: int) -> Sent:
    """Bytes this rank's host sends in an optimizer step after the first; the least of some steps."""
    module = WideBlocks()
    trainer = trainer_on_pool(
        context, strategy_of(parallel=parallel), max_steps=STEPS, max_epochs=-1, accumulate_grad_batches=accumulation
    )
    trainer.fit(module, loader_of([torch.ones(ROWS, WIDTH)] * STEPS * accumulation))
    return least_step(module.marks[1:])


@pytest.mark.parametrize(
    ("parallel", "accumulation", "passes"),
    [
        (TENSOR, 1, 2),  # each part is averaged: an all-reduce of two hosts
        (TENSOR, 4, 2),  # once a step
        (inside("zero2"), 1, PASSES["zero2"]),
        (inside("zero3"), 1, PASSES["zero3"]),
        pytest.param(inside("zero1"), 4, PASSES["zero1"], marks=pytest.mark.sweep),
        pytest.param(inside("hsdp"), 4, PASSES["hsdp"], marks=pytest.mark.sweep),
    ],
)
@pytest.mark.parametrize("name", ["2x2", "2x2 cyclic"])
def test_only_parts_cross_between_hosts(
    make_cluster: Callable[..., NamespaceCluster],
    make_pool: Callable[..., RankPool],
    name: str,
    parallel: dict[str, Any],
    accumulation: int,
    passes: int,
) -> None:
    layout = LAYOUTS[name]
    pool = make_pool(make_cluster(len(layout), rate_mbit=400), layout)
    sent = pool.run(count_step, args=(parallel, accumulation), deadline_s=60)
    payload = SHARING * passes * ring_reduce_scatter_bytes(4 * PART, len(layout))
    for of_host in sent:
        assert_sent(of_host, payload)
