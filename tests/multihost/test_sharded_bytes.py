"""Bytes on each host's link of one optimizer step of a sharded model, against the formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_dist.comm.codecs import codec_of
from lightning_dist.config import SyncConfig
from lightning_dist.laws import ring_reduce_scatter_bytes
from tests.distributed.lightning_runs import loader_of, strategy_of, trainer_on_pool
from tests.distributed.sharded_runs import MODES
from tests.multihost.test_bytes import LAYOUTS
from tests.multihost.traffic import Sent, assert_sent, least_step, sent_bytes
from tests.support.cluster import NamespaceCluster
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

WIDTH, BLOCKS, STEPS = 256, 8, 5
PASSES = {"zero1": 2, "zero2": 2, "zero3": 3, "hpz": 2, "hsdp": 2}
"""How often the model's bytes cross: gathered for the forward (and the backward), and summed."""


class Wide(pl.LightningModule):
    """Counts what its host sends between the ends of two optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
        self.marks: list[Sent] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).pow(2).mean()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.trainer.strategy.barrier()
        self.marks.append(sent_bytes())
        self.trainer.strategy.barrier()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def count_step(context: RankContext, strategy: dict[str, Any], accumulation: int) -> Sent:
    """Bytes this rank's host sends in an optimizer step after the first; the least of some steps."""
    module = Wide()
    trainer = trainer_on_pool(
        context, strategy_of(**strategy), max_steps=STEPS, max_epochs=-1, accumulate_grad_batches=accumulation
    )
    trainer.fit(module, loader_of([torch.ones(2, WIDTH)] * STEPS * accumulation))
    return least_step(module.marks[1:])


ACCUMULATING = {
    "zero1": 2,  # gathered once, summed once
    "zero2": 1 + 4,  # gathered once, summed after each micro-batch
    "hsdp": 2,  # gathers stay inside the host, what the host has summed crosses once
}
CASES = {
    f"{name}-{mode}-{accumulation}": (name, mode, accumulation, passes)
    for name in ("2x2", "2x2 cyclic")
    for accumulation, modes in ((1, PASSES), (4, ACCUMULATING))
    for mode, passes in modes.items()
}
ALWAYS = [
    *("2x2-zero1-4", "2x2-zero2-1", "2x2-zero3-1", "2x2-hpz-1", "2x2-hsdp-4"),
    *("2x2 cyclic-zero1-1", "2x2 cyclic-zero2-4", "2x2 cyclic-zero3-1", "2x2 cyclic-hpz-1", "2x2 cyclic-hsdp-1"),
]


@pytest.mark.parametrize(("name", "mode", "accumulation", "passes"), sampled(CASES, ALWAYS))
def test_a_step_sends_what_its_formula_says(
    make_cluster: Callable[..., NamespaceCluster],
    make_pool: Callable[..., RankPool],
    name: str,
    mode: str,
    accumulation: int,
    passes: int,
) -> None:
    layout = LAYOUTS[name]
    pool = make_pool(make_cluster(len(layout), rate_mbit=400), layout)
    sent = pool.run(count_step, args=(MODES[mode], accumulation), deadline_s=60)
    size_bytes = 4 * BLOCKS * (WIDTH * WIDTH + WIDTH)
    payload = passes * ring_reduce_scatter_bytes(size_bytes, len(layout))
    for of_host in sent:
        assert_sent(of_host, payload)


@pytest.mark.parametrize(
    ("mode", "sync", "passes"),
    [
        ("zero2", {"codec": "int8"}, {"same": 1, "int8": 1}),
        ("zero3", {"codec": "onebit", "warmup_steps": 1, "gathers": "int8"}, {"int8": 2, "onebit": 1}),
        pytest.param("hsdp", {"codec": "topk"}, {"topk": 2}, marks=pytest.mark.sweep),
        pytest.param("zero1", {"codec": "topk", "gathers": "int8"}, {"int8": 1, "topk": 1}, marks=pytest.mark.sweep),
    ],
)
def test_codecs_send_what_they_claim(
    make_cluster: Callable[..., NamespaceCluster],
    make_pool: Callable[..., RankPool],
    mode: str,
    sync: dict[str, Any],
    passes: dict[str, int],
) -> None:
    """Sums and, where it is asked for, gathers of parameters, each by its codec."""
    layout = LAYOUTS["2x2"]
    pool = make_pool(make_cluster(len(layout), rate_mbit=400), layout)
    sent = pool.run(count_step, args=({**MODES[mode], "sync": sync}, 1), deadline_s=60)
    values = BLOCKS * (WIDTH * WIDTH + WIDTH)
    sizes = {"same": 4 * values}
    for name in ("int8", "onebit", "topk"):
        codec = codec_of(SyncConfig(codec=name))
        assert codec is not None
        sizes[name] = codec.encoded_bytes(values)
    payload = sum(times * ring_reduce_scatter_bytes(sizes[name], len(layout)) for name, times in passes.items())
    for of_host in sent:
        assert_sent(of_host, payload)
