"""Lanes of threads: order, overlap, failure, end. No process group is needed for any of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lightning_dist.comm.lanes import Step, ThreadPipeline
from lightning_dist.errors import CollectiveError

DEADLINE_S = 20.0


class Recorder:
    """Pieces whose steps write down what ran, and events to wait for their ends."""

    def __init__(self, pipeline: ThreadPipeline, lanes: int) -> None:
        self.pipeline = pipeline
        self.lanes = lanes
        self.ran: list[tuple[int, int]] = []  # (lane, piece)
        self.ended: list[threading.Event] = []
        self.outcomes: dict[int, list[BaseException | None]] = {}

    def submit(self, special: dict[int, Step] | None = None) -> int:
        number = len(self.ended)
        ended = threading.Event()
        self.ended.append(ended)
        self.outcomes[number] = []

        def step(lane: int) -> Step:
            def run() -> None:
                self.ran.append((lane, number))
                (special or {}).get(lane, lambda: None)()

            return run

        def end(error: BaseException | None) -> None:
            self.outcomes[number].append(error)
            ended.set()

        self.pipeline.submit([step(lane) for lane in range(self.lanes)], done=lambda: end(None), failed=end)
        return number

    def wait(self) -> None:
        assert all(ended.wait(DEADLINE_S) for ended in self.ended)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    pipeline = ThreadPipeline(["first", "second", "third"])
    yield Recorder(pipeline, 3)
    pipeline.close(DEADLINE_S)


def test_each_lane_keeps_the_order_of_submission(recorder: Recorder) -> None:
    for _ in range(50):
        recorder.submit()
    recorder.wait()
    for lane in range(3):
        assert [piece for ran_lane, piece in recorder.ran if ran_lane == lane] == list(range(50))
    assert all(outcome == [None] for outcome in recorder.outcomes.values())


def test_a_later_piece_runs_while_an_earlier_one_waits_further_on(recorder: Recorder) -> None:
    second_started = threading.Event()
    recorder.submit({1: lambda: _must(second_started)})  # blocks the second lane until the next piece is in the first
    recorder.submit({0: second_started.set})
    recorder.wait()
    assert recorder.outcomes == {0: [None], 1: [None]}


def test_a_failure_fails_what_is_under_way_and_all_that_follows_once_each() -> None:
    told: list[BaseException] = []
    pipeline = ThreadPipeline(["first", "second"], on_failure=told.append)
    recorder = Recorder(pipeline, 2)
    error, reached = RuntimeError("the link is down"), threading.Event()

    def fail() -> None:
        reached.set()
        raise error

    recorder.submit({1: fail})
    assert reached.wait(DEADLINE_S)
    for _ in range(5):
        recorder.submit()
    recorder.wait()
    assert [recorder.outcomes[number] for number in range(6)] == [[error]] * 6
    assert told == [error]
    assert pipeline.failure is error
    pipeline.close(DEADLINE_S)


def test_a_piece_that_is_done_is_not_failed_by_a_failure_elsewhere() -> None:
    """A lane fails while another finishes a piece: that piece has one outcome, and the lane lives on."""
    in_done, failed = threading.Event(), threading.Event()
    pipeline = ThreadPipeline(["first", "second"], on_failure=lambda _: failed.set())
    outcomes: list[str] = []

    def done() -> None:
        in_done.set()
        _must(failed)
        outcomes.append("done")

    def fail_when_the_first_is_done() -> None:
        _must(in_done)
        raise RuntimeError("late")

    later = threading.Event()
    pipeline.submit([lambda: None] * 2, done=done, failed=lambda _: outcomes.append("failed"))
    pipeline.submit([fail_when_the_first_is_done, lambda: None], done=lambda: None, failed=lambda _: later.set())
    assert later.wait(DEADLINE_S)
    pipeline.close(DEADLINE_S)
    assert outcomes == ["done"]


def test_what_frees_the_other_lanes_is_called_in_time() -> None:
    """A lane may be stuck in a wait that only ``on_failure`` ends."""
    freed = threading.Event()
    pipeline = ThreadPipeline(["first", "second"], on_failure=lambda _: freed.set())
    recorder = Recorder(pipeline, 2)
    recorder.submit({1: lambda: _must(freed)})
    recorder.submit({0: _raise})
    recorder.wait()
    pipeline.close(DEADLINE_S)
    assert not _lanes_alive()


def test_closing_ends_what_is_queued_and_refuses_more(recorder: Recorder) -> None:
    for _ in range(10):
        recorder.submit()
    recorder.pipeline.close(DEADLINE_S)
    recorder.pipeline.close(DEADLINE_S)
    assert all(outcome == [None] for outcome in recorder.outcomes.values())
    assert not _lanes_alive()
    with pytest.raises(CollectiveError, match="torn down"):
        recorder.submit()


def test_closing_gives_up_on_a_stuck_lane() -> None:
    release = threading.Event()
    pipeline = ThreadPipeline(["first"])
    pipeline.submit([lambda: _must(release)], done=lambda: None, failed=lambda _: None)
    pipeline.close(0.05)
    assert _lanes_alive()
    release.set()
    pipeline.close(DEADLINE_S)
    assert not _lanes_alive()


def test_a_piece_has_a_step_for_each_lane(recorder: Recorder) -> None:
    with pytest.raises(ValueError, match="2 steps for 3 lanes"):
        recorder.pipeline.submit([lambda: None] * 2, done=lambda: None, failed=lambda _: None)


def _must(event: threading.Event) -> None:
    assert event.wait(DEADLINE_S)


def _raise() -> None:
    raise RuntimeError("broken")


def _lanes_alive() -> bool:
    return any(thread.name.startswith("hierdist-lane") for thread in threading.enumerate())
