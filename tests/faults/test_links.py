"""A host whose link is pulled, between real network namespaces: both sides of the cut say who is beyond it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.runs import (
    HOSTS,
    LOAD_S,
    TIMEOUT_S,
    Ending,
    assert_accused,
    sum_until_cut_off,
    sum_until_failure,
)
from tests.support.cluster import Host, NamespaceCluster
from tests.support.faults import Fault
from tests.support.ranks import Died, RankPool

pytestmark = pytest.mark.multihost


def pull_when_ready(host: Host, signal: Path, *, back_after_s: float | None) -> threading.Thread:
    """Pull the host's link once ``signal`` is there, and write down when; plug it in again if asked."""

    def pull() -> None:
        end = time.monotonic() + 30
        while not signal.exists() and time.monotonic() < end:
            time.sleep(0.005)
        host.set_link(up=False)
        signal.write_text(str(time.monotonic()))
        if back_after_s is not None:
            time.sleep(back_after_s)
            host.set_link(up=True)

    thread = threading.Thread(target=pull)
    thread.start()
    return thread


@pytest.mark.parametrize("cut", ["a", "b"])
def test_a_pulled_link_is_noticed_on_both_sides(
    make_cluster: Callable[..., NamespaceCluster],
    make_pool: Callable[..., RankPool],
    tmp_path: Path,
    cut: str,
) -> None:
    cluster = make_cluster(2)
    pool = make_pool(cluster, HOSTS)
    signal = tmp_path / "ready"
    puller = pull_when_ready(cluster[cut], signal, back_after_s=None)
    endings: list[Ending] = pool.run(
        sum_until_cut_off, args=(str(signal), 100_000, TIMEOUT_S), init_group=False, fresh=True, deadline_s=60
    )
    puller.join()
    for ending in endings[:2]:  # beside the store
        assert_accused(ending, 2, "node1")
        assert_accused(ending, 3, "node1")
    for ending in endings[2:]:
        assert_accused(ending, 0, "node0")
    assert all(ending.close_s < TIMEOUT_S + LOAD_S for ending in endings)


def test_a_link_that_comes_back_in_time_fails_nothing(
    make_cluster: Callable[..., NamespaceCluster], make_pool: Callable[..., RankPool], tmp_path: Path
) -> None:
    cluster = make_cluster(2)
    pool = make_pool(cluster, HOSTS)
    signal = tmp_path / "ready"
    puller = pull_when_ready(cluster["b"], signal, back_after_s=1.0)
    endings = pool.run(sum_until_cut_off, args=(str(signal), 30, 15.0), init_group=False, fresh=True, deadline_s=60)
    puller.join()
    assert [ending.error for ending in endings] == [""] * 4


@pytest.mark.parametrize(("kind", "rank"), [("kill", 0), ("kill", 3), ("stop", 2)])
def test_a_lost_rank_is_named_across_real_hosts(
    make_cluster: Callable[..., NamespaceCluster], make_pool: Callable[..., RankPool], kind: str, rank: int
) -> None:
    pool = make_pool(make_cluster(2), HOSTS)
    fault = Fault(rank, kind, "all_reduce", "cross", nth=8)  # type: ignore[arg-type]
    endings = pool.run(sum_until_failure, args=([fault],), init_group=False, may_die=[rank], deadline_s=60)
    assert isinstance(endings.pop(rank), Died)
    for ending in endings:
        assert_accused(ending, rank, "node0" if rank < 2 else "node1")
