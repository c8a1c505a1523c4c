"""Threads that fetch what is needed next, in its order, and so many bytes ahead of what has been asked for at most."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from lightning_dist.data.index.dataset_index import Chunk


class FetchAhead:
    """Fetches chunks before they are asked for.

    A chunk counts from when a thread takes it until it is asked for. One that is larger than all that may be ahead is
    left to whoever asks for it.

    Args:
        fetch: Called in a thread, for one chunk at a time in each; what it raises it has to deal with itself.
        num_threads: How many, started with the first :meth:`expect`.
        ahead_bytes: How many bytes may be fetched and not asked for, those being fetched included.
    """

    def __init__(self, fetch: Callable[[Chunk], None], *, num_threads: int, ahead_bytes: int) -> None:
        self._fetch = fetch
        self._num_threads = num_threads
        self._ahead_bytes = ahead_bytes
        self._changed = threading.Condition()
        self._coming: Iterator[Chunk] = iter(())
        self._next: Chunk | None = None
        self._ahead: dict[int, int] = {}  # number -> bytes
        self._running: set[int] = set()
        self._unexpected: set[int] = set()  # running, and expected no more
        self._asked: set[int] = set()  # before a thread came to it
        self._error: Exception | None = None
        self._urgent = 0
        self._ended = False
        self._threads: list[threading.Thread] = []

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """Fetch these, in this order, instead of what was expected before.

        Args:
            chunks: Taken one by one in the threads, so it may be long; it must not ask for chunks itself.
        """
        with self._changed:
            if self._ended or not self._num_threads:
                return
            self._coming, self._next, self._error = iter(chunks), None, None
            self._unexpected = set(self._running)
            self._ahead = {number: size for number, size in self._ahead.items() if number in self._running}
            self._asked.clear()
            self._changed.notify_all()
            while len(self._threads) < self._num_threads:
                name = f"hierdist-fetch-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                self._threads[-1].start()

    def asked(self, chunk: Chunk) -> None:
        """A chunk is asked for: it counts no more.

        Raises:
            Exception: What the iterable of expected chunks raised.
        """
        with self._changed:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._next is not None and self._next.number == chunk.number:
                self._next = None
            elif self._ahead.pop(chunk.number, None) is None:
                self._asked.add(chunk.number)
                return
            self._changed.notify_all()

    @contextlib.contextmanager
    def urgent(self) -> Iterator[None]:
        """While something that is asked for is being fetched: threads begin with nothing new."""
        with self._changed:
            self._urgent += 1
        try:
            yield
        finally:
            with self._changed:
                self._urgent -= 1
                self._changed.notify_all()

    def close(self, *, wait_s: float) -> list[str]:
        """End the threads; names of those that have not ended in time. Safe to call twice."""
        with self._changed:
            self._ended = True
            self._coming, self._next = iter(()), None
            self._changed.notify_all()
        end = time.monotonic() + wait_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _run(self) -> None:
        while True:
            with self._changed:
                chunk = self._take()
                while chunk is None:
                    if self._ended:
                        return
                    self._changed.wait()
                    chunk = self._take()
            try:
                self._fetch(chunk)
            finally:
                with self._changed:
                    self._running.discard(chunk.number)
                    if chunk.number in self._unexpected:
                        self._unexpected.discard(chunk.number)
                        self._ahead.pop(chunk.number, None)
                    self._changed.notify_all()

    def _take(self) -> Chunk | None:
        """The next chunk to fetch now; ``None`` if there is none, or no room for it."""
        if self._ended or self._urgent:
            return None
        chunk = self._peek()
        if chunk is None or sum(self._ahead.values()) + chunk.size_bytes > self._ahead_bytes:
            return None
        self._next = None
        self._ahead[chunk.number] = chunk.size_bytes
        self._running.add(chunk.number)
        return chunk

    def _peek(self) -> Chunk | None:
        while self._next is None:
            try:
                chunk = next(self._coming, None)
            except Exception as error:  # told to whoever asks next
                self._error, self._coming = error, iter(())
                return None
            if chunk is None:
                return None
            if chunk.number in self._asked:
                self._asked.discard(chunk.number)
            elif chunk.number in self._ahead or chunk.number in self._running:
                self._unexpected.discard(chunk.number)  # it is being fetched already, for an earlier expectation
            elif chunk.size_bytes <= self._ahead_bytes:
                self._next = chunk
        return self._next
