"""Bytes of ``sync=local_sgd`` on each host's link, by the kernel: those of one average in as many steps as it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_dist.comm.codecs.int8 import Int8Codec
from lightning_dist.laws import hierarchical_bytes_per_host
from tests.distributed.lightning_runs import loader_of, strategy_of, trainer_on_pool
from tests.multihost.traffic import Sent, assert_sent, least_step, sent_bytes
from tests.support.cluster import NamespaceCluster
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

LAYOUT = {"a": [0, 1], "b": [2, 3]}
WIDTH, EVERY, ROUNDS = 1024, 4, 3
NUMEL = WIDTH * WIDTH
CASES: dict[str, tuple[str, dict[str, Any], float]] = {
    "ddp": ("ddp", {}, hierarchical_bytes_per_host(4 * NUMEL, 2)),
    "zero2": ("zero2", {}, hierarchical_bytes_per_host(4 * NUMEL, 2)),
    "zero2-int8": ("zero2", {"codec": "int8"}, hierarchical_bytes_per_host(Int8Codec().encoded_bytes(NUMEL), 2)),
}


class Wide(pl.LightningModule):
    """One matrix, whose gradients are known to be cheap."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Marks(pl.Callback):
    """What the host has sent, each time that workers have met."""

    def __init__(self, context: RankContext) -> None:
        self.marks: list[Sent] = []
        self._context = context

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step % EVERY == 0:
            self._context.barrier()
            self.marks.append(sent_bytes())
            self._context.barrier()


def count(context: RankContext, parallel: str, sync: dict[str, Any]) -> tuple[str, Sent]:
    marks = Marks(context)
    strategy = strategy_of(parallel=parallel, sync={"algorithm": "local_sgd", "local_sgd": {"every": EVERY}, **sync})
    trainer = trainer_on_pool(context, strategy, callbacks=[marks])
    generator = torch.Generator().manual_seed(context.rank)
    batches = [torch.randn(2, WIDTH, generator=generator) for _ in range(EVERY * (ROUNDS + 1))]
    trainer.fit(Wide(), loader_of(batches))
    return context.host, least_step(marks.marks)


@pytest.mark.parametrize(("parallel", "sync", "payload_bytes"), sampled(CASES, ["ddp"]))
def test_hosts_send_one_average_in_as_many_steps(
    make_cluster: Callable[..., NamespaceCluster],
    make_pool: Callable[..., RankPool],
    parallel: str,
    sync: dict[str, Any],
    payload_bytes: float,
) -> None:
    cluster = make_cluster(len(LAYOUT), rate_mbit=400)
    for host, sent in make_pool(cluster, LAYOUT).run(count, args=(parallel, sync), deadline_s=60):
        print(f"{host}: {sent}, of {payload_bytes:.0f}")
        assert_sent(sent, payload_bytes)
