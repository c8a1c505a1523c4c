"""Whose snapshot is kept by whom: on another host, evenly, for any placement; and how fast it is sent."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

from lightning_dist.checkpoint.buddies import buddies
from lightning_dist.checkpoint.rate import RateLimit


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("a", (None,)),
        ("aaa", (None, None, None)),
        ("ab", (1, 0)),
        ("aabb", (2, 3, 0, 1)),
        ("abab", (1, 0, 3, 2)),
        ("aaab", (3, 3, 3, 0)),
        ("abc", (1, 2, 0)),
        ("abcd", (1, 0, 3, 2)),
        ("abcde", (1, 0, 3, 4, 2)),
        ("aaabcccd", (4, 5, 6, 7, 0, 1, 2, 3)),  # large ones with each other
    ],
)
def test_small_placements(hosts: str, expected: tuple[int | None, ...]) -> None:
    assert buddies(list(hosts)) == expected


@pytest.mark.parametrize("seed", range(20))
def test_any_placement_has_buddies_elsewhere_and_spreads_them_evenly(seed: int) -> None:
    rng = random.Random(seed)
    hosts = [f"host{rng.randrange(2 + seed)}" for _ in range(4 + 5 * seed)]
    hosts += ["host0", "host1"]  # two at least
    found = buddies(hosts)
    kept = Counter(found)
    for rank, buddy in enumerate(found):
        assert buddy is not None
        assert hosts[buddy] != hosts[rank]
    givers = {host: {hosts[found[rank]] for rank in range(len(hosts)) if hosts[rank] == host} for host in hosts}  # type: ignore[index]
    assert all(len(keepers) == 1 for keepers in givers.values())
    assert Counter(next(iter(keepers)) for keepers in givers.values()) == dict.fromkeys(hosts, 1)
    sizes = Counter(hosts)
    for host, keepers in givers.items():
        loads = [kept[rank] for rank in range(len(hosts)) if hosts[rank] == next(iter(keepers))]
        assert sum(loads) == sizes[host]
        assert max(loads) - min(loads) <= 1


def test_ten_thousand_ranks_take_no_time() -> None:
    start_s = time.process_time()
    found = buddies([f"host{rank % 1250}" for rank in range(10_000)])
    assert time.process_time() - start_s < 5  # seconds; it takes 0.02
    assert len(set(found)) == 10_000


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.slept.append(duration_s)
        self.now_s += duration_s


def test_bytes_wait_for_their_turn() -> None:
    clock = Clock()
    limit = RateLimit(1000, burst_s=0.5, clock=clock, sleep=clock.sleep)
    limit.take(500)  # the burst
    assert clock.slept == []
    limit.take(250)
    limit.take(250)
    assert clock.slept == [0.25, 0.25]
    clock.now_s += 60  # a pause earns no more than the burst
    limit.take(1500)
    assert clock.slept[2:] == [1.0]


def test_the_rate_holds_over_any_sizes() -> None:
    clock, rng = Clock(), random.Random(1)
    limit = RateLimit(8192, burst_s=0.5, clock=clock, sleep=clock.sleep)
    sizes = [rng.randrange(1, 4096) for _ in range(500)]
    for size in sizes:
        clock.now_s += rng.random() * 0.01
        limit.take(size)
    sent_per_s = sum(sizes) / (clock.now_s - 100.0 + 0.5)
    assert 0.99 * 8192 < sent_per_s <= 8192 * (1 + 1e-9)  # the last one may have come late; the rest is rounding


def test_without_a_rate_nothing_waits() -> None:
    clock = Clock()
    RateLimit(None, clock=clock, sleep=clock.sleep).take(1 << 40)
    assert clock.slept == []
