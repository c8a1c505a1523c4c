"""Ranks that are told to be on one host but share no memory (containers of one name): found out, and done without."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_dist import build
from lightning_dist.comm.host_relay import exchanged
from lightning_dist.config import SyncConfig
from tests.distributed.runs import opened
from tests.distributed.test_scattered import open_run, open_scatter
from tests.support.cluster import NamespaceCluster
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext


def sum_and_describe(context: RankContext) -> tuple[list[float], str]:
    with opened(context, {"chunk_bytes": 4096}) as (run, all_reduce):
        assert run.cluster.num_hosts == 2
        tensor = torch.full((5000,), float(context.rank + 1))
        all_reduce.all_reduce(tensor)
        return tensor.unique().tolist(), all_reduce.description


def shard_and_describe(context: RankContext) -> tuple[list[float], list[float], bool]:
    run = open_run(context)
    scatter = open_scatter(run)
    try:
        assert run.cluster.num_hosts == 2
        shard = scatter.reduce_scatter(torch.zeros(900), torch.full((3600,), context.rank + 1.0)).wait()
        every = scatter.all_gather(torch.zeros(4, 900), shard * (context.rank + 1)).wait()
        return shard.unique().tolist(), every[:, 17].tolist(), scatter.shares_memory
    finally:
        scatter.close()
        run.close()


def relay_and_describe(context: RankContext) -> tuple[list[bytes], str]:
    run = open_run(context)
    try:
        with build.open_host_reading(run, SyncConfig(timeout_s=20.0), None) as relay:
            assert relay is not None
            return exchanged(relay, bytes([context.rank]) * 1000), type(relay).__name__
    finally:
        run.close()


def test_one_host_by_name_only(
    make_cluster: Callable[..., NamespaceCluster], make_pool: Callable[..., RankPool]
) -> None:
    """Ranks 0 and 1 sit in different containers of host "x", 2 and 3 share memory on host "y"."""
    pool = make_pool(make_cluster(3), {"a": [0], "b": [1], "c": [2, 3]})
    names = [{"HIERDIST_HOST": name} for name in ("x", "x", "y", "y")]
    for rank, (values, description) in enumerate(pool.run(sum_and_describe, env_per_rank=names)):
        assert values == [10.0]
        assert ("shared memory" in description) == (rank >= 2), description


def test_shards_of_one_host_by_name_only(
    make_cluster: Callable[..., NamespaceCluster], make_pool: Callable[..., RankPool]
) -> None:
    pool = make_pool(make_cluster(3), {"a": [0], "b": [1], "c": [2, 3]})
    names = [{"HIERDIST_HOST": name} for name in ("x", "x", "y", "y")]
    for rank, (shard, every, shares) in enumerate(pool.run(shard_and_describe, env_per_rank=names)):
        assert (shard, every) == ([10.0], [10.0, 20.0, 30.0, 40.0])
        assert shares == (rank >= 2)


def test_what_is_read_for_one_host_by_name_only(
    make_cluster: Callable[..., NamespaceCluster], make_pool: Callable[..., RankPool]
) -> None:
    pool = make_pool(make_cluster(3), {"a": [0], "b": [1], "c": [2, 3]})
    names = [{"HIERDIST_HOST": name} for name in ("x", "x", "y", "y")]
    for rank, (said, kind) in enumerate(pool.run(relay_and_describe, env_per_rank=names)):
        assert [each[:1] for each in said] == ([b"\0", b"\1"] if rank < 2 else [b"\2", b"\3"])
        assert kind == ("GroupRelay" if rank < 2 else "MemoryRelay")
