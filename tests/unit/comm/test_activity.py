"""What a rank waits for: told with each change, counted once however many threads wait, and ended by a release."""

from __future__ import annotations

import threading

import pytest

from lightning_dist.comm.testimony import Activity


class Clock:
    now_s = 10.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("lightning_dist.comm.testimony.time", clock)
    return clock


def test_each_change_is_told(clock: Clock) -> None:
    activity = Activity()
    told: list[tuple[int, int, str]] = []
    activity.tell(lambda *change: told.append(change))
    with activity.waiting("all_reduce on 'cross'"):
        pass
    with activity.waiting("barrier"):
        pass
    assert told == [
        (1, 1, "all_reduce on 'cross'"),
        (1, 0, "all_reduce on 'cross'"),
        (2, 1, "barrier"),
        (2, 0, "barrier"),
    ]


def test_nobody_is_told_any_more() -> None:
    activity = Activity()
    told: list[tuple[int, int, str]] = []
    activity.tell(lambda *change: told.append(change))
    activity.tell(None)
    with activity.waiting("barrier"):
        pass
    assert not told


def test_time_in_which_two_threads_wait_counts_once(clock: Clock) -> None:
    activity = Activity()
    inside, leave = threading.Event(), threading.Event()

    def wait_too() -> None:
        with activity.waiting("lane"):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=wait_too)
    with activity.waiting("main"):
        clock.now_s += 1
        thread.start()
        assert inside.wait(10)
        clock.now_s += 2
        leave.set()
        thread.join(10)
        clock.now_s += 4
        assert activity.waited_s == 7
    clock.now_s += 8
    assert activity.waited_s == 7


def test_waiting_in_waiting_counts_once(clock: Clock) -> None:
    activity = Activity()
    with activity.waiting("opening"):
        clock.now_s += 1
        with activity.waiting("all_reduce"):
            clock.now_s += 2
    assert activity.waited_s == 3


def test_a_release_says_why() -> None:
    activity = Activity()
    assert activity.released is None
    activity.release("rank 3 (host b) hangs")
    assert activity.released == "rank 3 (host b) hangs"
