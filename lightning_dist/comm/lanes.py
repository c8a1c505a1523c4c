"""Ordered lanes: one FIFO a phase, so that each process group sees the same order of operations on every rank.

A piece of work (a chunk of a bucket) is a list of steps, one for each lane. A lane runs its steps strictly in the order
in which the pieces were submitted and hands each piece to the next lane, so while one piece crosses the network the
next is reduced inside the host. Because a lane alone uses its process group, the order of a group's operations is the
order of submission, whatever the threads do.

On CPU a lane is a thread. On CUDA a lane is a stream: submitting enqueues all steps at once, an event orders them
between streams, and no thread and no host synchronisation is involved.

Note [Why not future.then]
    Starting a collective from another collective's ``future.then`` deadlocks: callbacks run in the order in which the
    first collectives happen to finish, which differs between ranks, so two ranks enter two collectives of one group in
    opposite order.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from lightning_dist.errors import CollectiveError

Step = Callable[[], None]


class Pipeline(Protocol):
    """A row of lanes."""

    def submit(self, steps: Sequence[Step], *, done: Step, failed: Callable[[BaseException], None]) -> None:
        """Run ``steps[i]`` on lane ``i``, in order, then ``done``; a step that raises calls ``failed`` instead.

        After a failure the pipeline is broken: what was submitted before and is not yet done, and all that is submitted
        later, fails with the same error.
        """

    def close(self, timeout_s: float) -> None:
        """End the lanes; what is still queued is failed. Safe to call twice."""


class _Piece:
    """Work on its way through the lanes."""

    __slots__ = ("done", "failed", "steps")

    def __init__(self, steps: Sequence[Step], done: Step, failed: Callable[[BaseException], None]) -> None:
        self.steps = steps
        self.done = done
        self.failed = failed


class ThreadPipeline:
    """Lanes that are threads, for CPU tensors.

    Args:
        names: One name a lane, first to last; they name the threads.
        on_failure: Called once, in the failing lane's thread, with the first error; it must free whatever the other
            lanes may be waiting for.
    """

    def __init__(self, names: Sequence[str], *, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._on_failure = on_failure
        self._failure: BaseException | None = None
        self._failure_lock = threading.Lock()
        self._closed = False
        self._queues: list[queue.SimpleQueue[_Piece | None]] = [queue.SimpleQueue() for _ in names]
        self._threads = [
            threading.Thread(target=self._run_lane, args=(index,), name=f"hierdist-lane-{name}", daemon=True)
            for index, name in enumerate(names)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def failure(self) -> BaseException | None:
        """The first error of any lane."""
        return self._failure

    def submit(self, steps: Sequence[Step], *, done: Step, failed: Callable[[BaseException], None]) -> None:
        """See :class:`Pipeline`."""
        if len(steps) != len(self._queues):
            raise ValueError(f"{len(steps)} steps for {len(self._queues)} lanes")
        if self._closed:
            raise CollectiveError(
                "the lanes have ended, because the strategy was torn down: nothing can be sent any more"
            )
        self._queues[0].put(_Piece(steps, done, failed))

    def close(self, timeout_s: float) -> None:
        """See :class:`Pipeline`. Waits at most ``timeout_s`` seconds for the threads to end."""
        if not self._closed:
            self._closed = True
            self._queues[0].put(None)
        give_up_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, give_up_s - time.monotonic()))

    def _run_lane(self, index: int) -> None:
        while self._run_next(index):
            pass  # nothing of a piece, such as its tensors, is kept while the lane waits for the next

    def _run_next(self, index: int) -> bool:
        last = index == len(self._queues) - 1
        piece = self._queues[index].get()
        if piece is None:
            if not last:
                self._queues[index + 1].put(None)
            return False
        if self._failure is None and self._run_step(piece, index, last=last) and last:
            return True  # it is done, whatever fails from now on
        if self._failure is not None:
            with contextlib.suppress(Exception):  # its future may be completed; the lane must live on
                piece.failed(self._failure)
        else:
            self._queues[index + 1].put(piece)
        return True

    def _run_step(self, piece: _Piece, index: int, *, last: bool) -> bool:
        try:
            piece.steps[index]()
            if last:
                piece.done()
        except BaseException as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: BaseException) -> None:
        with self._failure_lock:
            first = self._failure is None
            if first:
                self._failure = error
        if first and self._on_failure is not None:
            self._on_failure(error)


class StreamPipeline:
    """Lanes that are CUDA streams, for CUDA tensors.

    ``submit`` makes the first lane wait for the caller's current stream, so tensors written there may be read. Whoever
    uses the result must wait for ``done``'s stream; :class:`torch.futures.Future` with ``devices`` does so by itself
    when its result is set inside ``done``.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device=device) for _ in names]
        self._failure: BaseException | None = None

    @property
    def failure(self) -> BaseException | None:
        """The first error raised while enqueueing."""
        return self._failure

    def submit(self, steps: Sequence[Step], *, done: Step, failed: Callable[[BaseException], None]) -> None:
        """See :class:`Pipeline`."""
        if len(steps) != len(self._streams):
            raise ValueError(f"{len(steps)} steps for {len(self._streams)} lanes")
        if self._failure is not None:
            failed(self._failure)
            return
        previous = torch.cuda.current_stream(self._device)
        try:
            for stream, step in zip(self._streams, steps, strict=True):
                stream.wait_stream(previous)
                with torch.cuda.stream(stream):
                    step()
                previous = stream
            with torch.cuda.stream(previous):
                done()
        except BaseException as error:
            self._failure = error
            failed(error)

    def close(self, timeout_s: float) -> None:
        """See :class:`Pipeline`. Streams are released with this object; nothing is waited for."""
        del timeout_s
