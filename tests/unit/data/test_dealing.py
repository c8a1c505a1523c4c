"""Who takes which samples of a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dist.data.index.dataset_index import Numbers
from lightning_dist.data.order.dealing import Dealing
from lightning_dist.errors import ConfigError

placements = st.lists(st.integers(0, 4), min_size=1, max_size=10).map(tuple)
lane_numbers = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 15, 24, 30])


def taken(dealing: Dealing, start: int, stop: int) -> list[Numbers]:
    return [dealing.take(replica, start, stop) for replica in range(dealing.num_replicas)]


def hosts_of_lanes(dealing: Dealing, batches: int = 40, batch: int = 6) -> list[set[int]]:
    """Which hosts take samples of each lane in some steps of ``batch`` samples a replica."""
    size = dealing.num_replicas * batch
    hosts: list[set[int]] = [set() for _ in range(dealing.lanes)]
    for step in range(batches):
        for replica, numbers in enumerate(taken(dealing, step * size, (step + 1) * size)):
            for lane in np.unique(numbers % dealing.lanes).tolist():
                hosts[lane].add(dealing.host_of_replica[replica])
    return hosts


@settings(deadline=None)
@given(hosts=placements, lanes=lane_numbers, start=st.integers(0, 10**15), count=st.integers(0, 80))
def test_each_sample_goes_to_one_replica_and_all_get_as_many(
    hosts: tuple[int, ...], lanes: int, start: int, count: int
) -> None:
    parts = taken(Dealing(hosts, lanes), start, start + count)
    assert sorted(np.concatenate(parts).tolist()) == list(range(start, start + count))
    assert all(np.array_equal(part, np.sort(part)) for part in parts)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= (1 if count % len(hosts) else 0)


@settings(deadline=None)
@given(hosts=placements, lanes=lane_numbers)
def test_hosts_share_lanes_only_where_that_is_said(hosts: tuple[int, ...], lanes: int) -> None:
    dealing = Dealing(hosts, lanes)
    shared = dealing.shared_lanes()
    if shared is None:
        assert {len(found) for found in hosts_of_lanes(dealing)} == {1}
    else:
        assert max(len(found) for found in hosts_of_lanes(dealing)) > 1
        assert set(shared.hosts) < set(hosts)
        assert shared.write_lanes > lanes
        assert {len(found) for found in hosts_of_lanes(Dealing(hosts, shared.write_lanes))} == {1}


@pytest.mark.parametrize(
    ("hosts", "lanes"),
    [
        ((0, 0, 0, 0), 24),  # one host
        ((0, 0, 1, 1), 24),
        ((0, 1, 0, 1), 24),  # ranks numbered in turn
        ((0, 0, 0, 1), 24),  # uneven, and as many replicas as divide the lanes
        ((0, 0, 0, 0, 0, 1, 1, 1), 24),
        (tuple(host for host in range(3) for _ in range(5)), 24),  # 15 replicas do not divide 24, their hosts do
        (tuple(host for host in range(2) for _ in range(7)), 2),
        ((0, 0, 0, 0, 1, 1), 3),  # pairs of replicas
    ],
)
def test_lanes_belong_to_one_host_each_in_proportion(hosts: tuple[int, ...], lanes: int) -> None:
    dealing = Dealing(hosts, lanes)
    assert dealing.shared_lanes() is None
    of_lanes = [found.pop() for found in hosts_of_lanes(dealing, batches=10, batch=lanes)]
    for host in set(hosts):
        assert of_lanes.count(host) * len(hosts) == lanes * hosts.count(host)


def test_a_replica_has_lanes_of_its_own_where_replicas_divide_them() -> None:
    dealing = Dealing((0, 0, 1, 1), 24)
    lanes = [set((dealing.take(replica, 0, 480) % 24).tolist()) for replica in range(4)]
    assert [len(each) for each in lanes] == [6, 6, 6, 6]
    assert len(set.union(*lanes)) == 24


def test_lanes_of_equal_hosts_are_alike_mod_hosts() -> None:
    for hosts in ((0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 0, 0, 1, 1, 1, 1, 1)):
        assert hosts_of_lanes(Dealing(hosts, 24)) == [{0}, {1}] * 12


@pytest.mark.parametrize(
    ("hosts", "lanes", "short", "write", "share"),
    [
        ((0, 0, 0, 1, 1), 24, (0,), 25, 0.02),  # 14.4 and 9.6 lanes: 14 and 10
        ((0, 1, 2, 3, 4), 24, (4,), 25, 0.04),  # 4.8 lanes each: 5, 5, 5, 5 and 4
        ((0, 0, 1, 1), 1, (1,), 2, 0.51),  # one lane is of both
    ],
)
def test_what_is_over_goes_to_hosts_that_lack(
    hosts: tuple[int, ...], lanes: int, short: tuple[int, ...], write: int, share: float
) -> None:
    dealing = Dealing(hosts, lanes)
    shared = dealing.shared_lanes()
    assert shared is not None
    assert (shared.hosts, shared.write_lanes) == (short, write)
    size = 64 * len(hosts)
    counts = np.zeros((lanes, max(hosts) + 1), dtype=int)
    for step in range(50):
        for replica, numbers in enumerate(taken(dealing, step * size, (step + 1) * size)):
            assert len(numbers) == 64
            np.add.at(counts[:, hosts[replica]], numbers % lanes, 1)
    away = counts.sum() - counts.max(axis=1).sum()
    assert 0 < away <= share * counts.sum()


def test_one_lane_is_cut_into_runs() -> None:
    dealing = Dealing((0, 0, 1, 1), 1)
    assert [part.tolist() for part in taken(dealing, 8, 14)] == [[8, 9], [10], [11, 12], [13]]


def test_there_must_be_a_replica_and_a_lane() -> None:
    with pytest.raises(ConfigError, match="at least one replica, got none"):
        Dealing((), 24)
    with pytest.raises(ConfigError, match="lanes=0 lanes: must be at least 1"):
        Dealing((0,), 0)
