"""Checkpoints in the memory of two hosts: one host's memory is lost, and the run goes on from what the other kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from lightning_dist.checkpoint.keeper import client
from tests.distributed import test_replicas as one_host
from tests.support.cluster import NamespaceCluster
from tests.support.processes import is_alive
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

PLACEMENT = {"a": [0], "b": [1]}


def train(context: RankContext, folder: str, replica: str) -> None:
    one_host.train(context, folder, "zero2", {"replica": replica, "replica_rate": "50MB"})


def go_on(context: RankContext, path: str, reads_storage: bool) -> tuple[dict[str, torch.Tensor], int]:
    return one_host.go_on(context, path, "zero2", reads_storage)


def end_keeper(context: RankContext, folder: str, rank: int) -> dict[str, int]:
    """On the host of one rank; the files that it had, with their sizes."""
    keeper = client.find(client.name_of(folder))
    if context.rank != rank or keeper is None:
        return {}
    process = psutil.Process(keeper.about()["process"])
    had = {name: size for each in keeper.folders() for name, size in keeper.list(each).items()}
    keeper.end()
    assert not is_alive(process)
    return had


@pytest.mark.parametrize("lost", [0, 1])
def test_a_run_goes_on_from_the_buddy_of_a_lost_host(
    make_cluster: Callable[..., NamespaceCluster], make_pool: Callable[..., RankPool], tmp_path: Path, lost: int
) -> None:
    cluster = make_cluster(2)
    pool = make_pool(cluster, PLACEMENT)
    pool.run(train, args=(str(tmp_path), "buddy"))
    expected = pool.run(go_on, args=(str(tmp_path / "4.ckpt"), True))
    had = pool.run(end_keeper, args=(str(tmp_path), lost))[lost]
    assert sorted(name[:9] for name in had) == ["COMMITTED", "manifest-", "rank00000", "rank00001"]
    before = cluster[("a", "b")[1 - lost]].tx_bytes()
    got = pool.run(go_on, args=(str(tmp_path / "4.ckpt"), False))
    assert cluster[("a", "b")[1 - lost]].tx_bytes() - before > max(had.values()) / 2  # the lost host reads there
    for (weights, step), (wanted, _) in zip(got, expected, strict=True):
        assert step == 6
        for name, value in wanted.items():
            assert torch.equal(weights[name], value), name
    pool.run(end_keeper, args=(str(tmp_path), 1 - lost))


def test_without_a_buddy_a_lost_host_costs_the_memory_of_both(
    make_cluster: Callable[..., NamespaceCluster], make_pool: Callable[..., RankPool], tmp_path: Path
) -> None:
    pool = make_pool(make_cluster(2), PLACEMENT)
    pool.run(train, args=(str(tmp_path), "memory"))
    for weights, step in pool.run(go_on, args=(str(tmp_path / "4.ckpt"), False)):  # both are there
        assert (step, bool(weights)) == (6, True)
    had = pool.run(end_keeper, args=(str(tmp_path), 1))[1]
    assert sorted(name[:9] for name in had) == ["COMMITTED", "manifest-", "rank00001"]
    with pytest.raises(Exception, match="is read"):
        pool.run(go_on, args=(str(tmp_path / "4.ckpt"), False))
    pool.run(end_keeper, args=(str(tmp_path), 0))


def test_half_the_ranks_go_on_from_the_memory_of_the_host_that_is_left(
    make_cluster: Callable[..., NamespaceCluster], make_pool: Callable[..., RankPool], tmp_path: Path
) -> None:
    """Two hosts of two ranks; the one with rank 0 is lost, and the other goes on with its two."""
    cluster = make_cluster(2)
    path = str(tmp_path / "4.ckpt")
    both = make_pool(cluster, {"a": [0, 1], "b": [2, 3]})
    both.run(train, args=(str(tmp_path), "buddy"))
    both.run(end_keeper, args=(str(tmp_path), 0))
    left = make_pool(cluster, {"b": [0, 1]})
    expected = left.run(go_on, args=(path, True))
    for (weights, step), (wanted, _) in zip(left.run(go_on, args=(path, False)), expected, strict=True):
        assert step == 6
        for name, value in wanted.items():
            assert torch.equal(weights[name], value), name
    both.run(end_keeper, args=(str(tmp_path), 2))
