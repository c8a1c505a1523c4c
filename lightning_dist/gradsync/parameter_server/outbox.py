"""Work for the servers that is done beside training: in order, by one thread, and never more of it than is allowed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from lightning_dist.comm.bounded import LOOK_UP_S
from lightning_dist.comm.lanes import ThreadPipeline
from lightning_dist.errors import CollectiveTimeoutError, PeerLostError

_Result = TypeVar("_Result")


class Outbox:
    """Jobs that a thread does one after the other. After one has failed, each later call raises its error.

    Args:
        name: The thread's.
        capacity: Jobs that may wait or be under way; who brings one more waits.
        timeout_s: Deadline of each wait, in seconds.
        alarm: Given the seconds waited, says why to give up, or ``None``.
    """

    def __init__(self, name: str, *, capacity: int, timeout_s: float, alarm: Callable[[float], str | None]) -> None:
        self._lane = ThreadPipeline([name])
        self._name = name
        self._capacity = capacity
        self._timeout_s = timeout_s
        self._alarm = alarm
        self._pending = 0
        self._changed = threading.Condition()

    @property
    def is_full(self) -> bool:
        """Whether the next job would have to wait for one before it to end."""
        return self._pending >= self._capacity

    def submit(self, job: Callable[[], _Result]) -> Future[_Result]:
        """Have a job done, once there is room for it.

        Raises:
            CollectiveTimeoutError: There was no room in time.
            Exception: What a job before has raised.
        """
        self._wait_for_room()
        future: Future[_Result] = Future()
        results: list[_Result] = []
        with self._changed:
            self._pending += 1
        self._lane.submit(
            [lambda: results.append(job())],
            done=lambda: self._done(lambda: future.set_result(results[0])),
            failed=lambda error: self._done(lambda: future.set_exception(error)),
        )
        return future

    def result(self, future: Future[_Result]) -> _Result:
        """What a job has given, once it is done.

        Raises:
            CollectiveTimeoutError: It was not done in time.
            Exception: What it, or one before, has raised.
        """
        try:
            return future.result(self._timeout_s)
        except FutureTimeoutError as error:
            if future.done():  # it is the job's own
                raise
            raise CollectiveTimeoutError(f"waited {self._timeout_s:g} s (sync.timeout_s) for {self._name}") from error

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread; jobs that have not begun are left out once one has failed. Safe to call twice."""
        self._lane.close(timeout_s)

    def _done(self, tell: Callable[[], None]) -> None:
        tell()
        with self._changed:
            self._pending -= 1
            self._changed.notify_all()

    def _wait_for_room(self) -> None:
        start_s = time.monotonic()
        with self._changed:
            while not self._changed.wait_for(self._has_room, LOOK_UP_S):
                waited_s = time.monotonic() - start_s
                if waited_s >= self._timeout_s:
                    raise CollectiveTimeoutError(
                        f"waited {self._timeout_s:g} s (sync.timeout_s) for {self._name}, of which {self._capacity} "
                        "are under way (sync.parameter_server.max_pending)"
                    )
                if (alarm := self._alarm(waited_s)) is not None:
                    raise PeerLostError(f"waited {waited_s:.1f} s for {self._name}: {alarm}")
        if self._lane.failure is not None:
            raise self._lane.failure

    def _has_room(self) -> bool:
        return not self.is_full or self._lane.failure is not None
