"""Beats: who is late, judged by one clock; and the thread that beats, on stores that live, die and stand still."""

from __future__ import annotations

import gc
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_dist.monitor.beats import LEFT, BeatWatch, Silence
from lightning_dist.monitor.heartbeat import LANE, Heartbeat, watched_by
from lightning_dist.monitor.record import Span

DEADLINE_S = 30.0

# -- pure --------------------------------------------------------------------------------------------------------------


def look_each_second(watch: BeatWatch, counts: dict[int, list[int]]) -> list[tuple[int, Silence]]:
    """``counts``: of each rank, second by second."""
    seconds = range(len(next(iter(counts.values()))))
    return [
        (second, change)
        for second in seconds
        for change in watch.look({rank: each[second] for rank, each in counts.items()}, 1000.0 + second)
    ]


def test_a_rank_whose_count_stands_still_is_late_once_and_comes_back() -> None:
    watch = BeatWatch(timeout_s=3.0)
    found = look_each_second(watch, {1: [1, 2, 3, 4, 5, 6, 7, 8], 2: [1, 2, 2, 2, 2, 2, 2, 3]})
    assert found == [(5, Silence(2, 4.0, False)), (7, Silence(2, 6.0, True))]
    assert watch.late == []


def test_a_rank_that_has_left_is_never_late() -> None:
    assert look_each_second(BeatWatch(timeout_s=3.0), {1: [1, *[1 + LEFT] * 9]}) == []


def test_a_late_rank_that_leaves_is_back() -> None:
    found = look_each_second(BeatWatch(timeout_s=3.0), {1: [1, 1, 1, 1, 1, 1 + LEFT, 1 + LEFT]})
    assert [(second, change.is_over) for second, change in found] == [(4, False), (5, True)]


def test_time_in_which_nobody_looked_makes_nobody_late() -> None:
    """The looking process was stopped for an hour, and the store with it: nobody could beat."""
    watch = BeatWatch(timeout_s=3.0)
    assert watch.look({1: 5}, 0.0) == []
    assert watch.look({1: 5}, 3600.0) == []
    assert watch.look({1: 6}, 3601.0) == []


def test_each_silence_counts() -> None:
    found = look_each_second(BeatWatch(timeout_s=3.0), {1: [1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3]})
    assert [change.is_over for _, change in found] == [False, True, False, True]


@pytest.mark.parametrize("world_size", [2, 3, 1000])
def test_all_are_looked_at_by_another_and_once(world_size: int) -> None:
    looked_at = [other for rank in range(world_size) for other in watched_by(rank, world_size)]
    assert sorted(looked_at) == list(range(world_size))
    assert all(rank not in watched_by(rank, world_size) for rank in range(world_size))


# -- on stores ---------------------------------------------------------------------------------------------------------


class Rank:
    """A heartbeat, and what it said."""

    def __init__(self, store: dist.Store, rank: int, *, world_size: int = 2, timeout_s: float = 0.3) -> None:
        self.said: list[str] = []
        self.silences: list[Span] = []
        self.heart = Heartbeat(
            store,
            rank=rank,
            world_size=world_size,
            host="ab"[rank % 2],
            every_s=0.02,
            timeout_s=timeout_s,
            say=self.said.append,
            silent=self.silences.append,
            steps=lambda: 7,
        )


@pytest.fixture(scope="module")
def tcp_store() -> dist.Store:
    """One for all: pytest holds what a fixture of a test gives beyond the check for leaks."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


@pytest.fixture(params=["tcp", "file"])
def store(request: pytest.FixtureRequest, tcp_store: dist.Store, tmp_path: Path) -> dist.Store:
    if request.param == "tcp":
        return dist.PrefixStore(request.node.name, tcp_store)
    return dist.FileStore(str(tmp_path / "store"), 2)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "hierdist-monitor-heartbeat"]


def test_ranks_that_beat_and_leave_are_not_late(store: dist.Store) -> None:
    first, second = Rank(store, 0, timeout_s=20), Rank(store, 1, timeout_s=20)
    until(lambda: first.heart._begun == {1} and second.heart._begun == {0})
    second.heart.close()
    second.heart.close()
    first.heart.close()
    for rank in (first, second):
        assert rank.said == []
        assert rank.silences == []
        assert [reading.value for reading in rank.heart.read(0)] == [0]
    assert threads() == []


@pytest.mark.parametrize("late", [0, 1], ids=["rank-0", "rank-1"])
def test_a_rank_that_does_not_beat_is_counted_and_named(store: dist.Store, late: int) -> None:
    looking = Rank(store, 1 - late)
    killed = dist.PrefixStore("hierdist/heartbeat/1/", store)  # of this process group's first fit
    killed.set(f"host/{late}", "ab"[late])
    killed.add(f"beats/{late}", 1)
    until(lambda: looking.heart.timeouts)
    looking.heart.close()
    name = f"rank {late} (host {'ab'[late]})"
    (said,) = looking.said
    assert re.fullmatch(rf"no heartbeat from {re.escape(name)} for [\d.]+ s: stopped, swapped out, .*", said)
    (silence,) = looking.silences
    assert silence[:3] == (7, LANE, name)
    assert silence.end_ns - silence.start_ns > 0.3e9
    assert [reading.value for reading in looking.heart.read(0)] == [1]


def test_a_rank_that_beats_again_is_named(store: dist.Store) -> None:
    looking = Rank(store, 0)
    stopped = dist.PrefixStore("hierdist/heartbeat/1/", store)
    stopped.set("host/1", "b")
    stopped.add("beats/1", 1)
    until(lambda: looking.heart.timeouts)
    until(lambda: stopped.add("beats/1", 1) and len(looking.said) > 1)
    looking.heart.close()
    assert re.fullmatch(r"heartbeats again from rank 1 \(host b\), after [\d.]+ s", looking.said[1])


def test_a_second_fit_does_not_see_the_first_ones_beats(store: dist.Store) -> None:
    for _ in range(2):
        first, second = Rank(store, 0, timeout_s=20), Rank(store, 1, timeout_s=20)
        until(lambda first=first: first.heart._begun == {1})
        first.heart.close()
        second.heart.close()
    only = Rank(store, 0)
    until(lambda: int(store.get("hierdist/heartbeat/generation/0")) == 3)
    only.heart.close()
    assert only.heart._begun == set()
    assert only.said == []


SERVER = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(120)
"""


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def _client(server: subprocess.Popen[str]) -> dist.Store:
    assert server.stdout is not None
    port = int(server.stdout.readline())
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))


def test_a_store_that_dies_ends_the_heartbeat_and_is_said_once(server: subprocess.Popen[str]) -> None:
    rank = Rank(_client(server), 0)
    assert server.stdout is not None
    until(lambda: rank.heart._thread.is_alive() and not hasattr(rank.heart, "_default"))
    server.kill()
    until(lambda: not rank.heart._thread.is_alive())
    rank.heart.close()
    (said,) = rank.said
    assert said.startswith("the heartbeat has ended, training goes on: Dist")
    gc.collect()
    assert threads() == []


def test_a_store_that_stands_still_holds_nobody(server: subprocess.Popen[str]) -> None:
    rank = Rank(_client(server), 0)
    until(lambda: not hasattr(rank.heart, "_default"))
    server.send_signal(signal.SIGSTOP)
    rank.heart.close(wait_s=0.1)  # comes back at once, whatever the thread does
    server.kill()
    until(lambda: not rank.heart._thread.is_alive())
    assert rank.said == []
