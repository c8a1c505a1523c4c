"""Hierarchical reduce-scatter and all-gather: shard r belongs to rank r, for any placement, type and length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dist import build
from lightning_dist.comm.scattered import HierarchicalScatter
from lightning_dist.config import SyncConfig, TopologyConfig
from lightning_dist.events import EventStream
from tests.distributed.test_all_reduce import LAYOUTS, SWITCHES
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

DTYPES = ["float32", "bfloat16", "float16", "int64", "bool"]


def values(rank: int, numel: int, dtype: str) -> torch.Tensor:
    return ((torch.arange(numel) * 7 + rank * 3) % 5).to(getattr(torch, dtype))


def scatter_and_gather(context: RankContext, topology: dict[str, Any], chunk_bytes: int) -> list[str]:
    """Both operations on every type and some lengths, all under way at once; what is wrong, in words."""
    config = SyncConfig(timeout_s=20.0)
    events = EventStream(rank=context.rank)
    run = build.open_run(TopologyConfig(**topology), config, events=events, device=torch.device("cpu"))
    scatter = HierarchicalScatter(
        run.cluster,
        collectives=run.collectives,
        device=run.device,
        rank=context.rank,
        timeout_s=20.0,
        chunk_bytes=chunk_bytes,
    )
    n, problems, checks = context.world_size, [], []
    try:
        for dtype in DTYPES:
            for length in (501, 1, 0):
                whole = values(context.rank, n * length, dtype)
                shard = torch.zeros(length, dtype=whole.dtype)
                every = torch.zeros(n, length, dtype=whole.dtype)
                checks.append((dtype, length, scatter.reduce_scatter(shard, whole)))
                scatter.all_gather(every, values(100 + context.rank, length, dtype)).wait()
                if not torch.equal(every, torch.stack([values(100 + r, length, dtype) for r in range(n)])):
                    problems.append(f"all_gather {dtype}[{length}]")
        for dtype, length, future in checks:
            terms = [values(r, n * length, dtype).view(n, length)[context.rank] for r in range(n)]
            expected = torch.stack(terms).any(0) if dtype == "bool" else sum(terms).to(terms[0].dtype)
            if not torch.equal(future.wait(), expected):
                problems.append(f"reduce_scatter {dtype}[{length}]")
        strided = torch.arange(n * 6.0).view(6, n).t()
        mean = scatter.reduce_scatter(torch.empty(3, 2), strided * (context.rank + 1), mean=True).wait()
        if not torch.allclose(mean, strided.reshape(n, 3, 2)[context.rank] * (n + 1) / 2):
            problems.append("mean of a non-contiguous tensor")
        large = torch.full((n * 3,), 60000.0, dtype=torch.float16)
        if not torch.isfinite(
            scatter.reduce_scatter(torch.empty(3, dtype=torch.float16), large, mean=True).wait()
        ).all():
            problems.append("fp16 mean overflows")
    finally:
        scatter.close()
    return problems


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 1024])
@pytest.mark.parametrize("name", LAYOUTS)
def test_shard_r_belongs_to_rank_r(ranks: RankPool, name: str, chunk_bytes: int) -> None:
    topology = {"switches": SWITCHES[name]} if name in SWITCHES else {}
    for problems in ranks.run(scatter_and_gather, layout=LAYOUTS[name], args=(topology, chunk_bytes)):
        assert problems == []
