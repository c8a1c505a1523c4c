"""What is decoded of open chunks, in the memory of one process: bounded in bytes, whatever the files are.

A lane of the order takes the samples of a file in no order, and a batch takes from many lanes in turn. So what was
decoded for one sample stays for the next ones, until what was decoded since leaves it no room. Then it is decoded
again, from bytes that are still on this host.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

_SHARE = 16
"""Of the host's memory one rank takes that part by default: with eight ranks, half of it."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")

T = TypeVar("T")


class Sized(NamedTuple, Generic[T]):
    """A part of a chunk, decoded.

    Attributes:
        value: What samples are made of.
        size_bytes: What it takes beyond the file, which is mapped.
    """

    value: T
    size_bytes: int


class Decoded:
    """Decoded parts of the chunks that one process has open. Any thread may use it.

    Args:
        limit_bytes: Of all together; the part that is asked for stays, if it is larger. ``None`` is
            :func:`default_limit_bytes`.

    Attributes:
        size_bytes: What they take.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes if limit_bytes is not None else default_limit_bytes()
        self.size_bytes = 0
        self._lock = threading.RLock()  # a chunk may be collected, and so dropped, at any allocation
        self._parts: OrderedDict[_Key, Sized[Any]] = OrderedDict()
        self._let_go: set[_Key] = set()
        self._has_warned = False
        self._numbers = itertools.count()

    def of_chunk(self) -> Parts:
        """Those of a chunk that is being opened."""
        return Parts(self, next(self._numbers))

    def find(self, key: _Key) -> Sized[Any] | None:
        """A part, if it is here; it is the one used last then."""
        with self._lock:
            found = self._parts.get(key)
            if found is not None:
                self._parts.move_to_end(key)
            return found

    def add(self, key: _Key, part: Sized[Any]) -> None:
        """A part was decoded; those used least lately make room for it."""
        with self._lock:
            is_again = key in self._let_go and not self._has_warned
            self._has_warned |= is_again
            self._parts[key] = part
            self.size_bytes += part.size_bytes
            self._make_room()
        if is_again:
            warnings.warn(
                "files are decoded again and again, since those that are read by turns take more than the "
                f"{self.limit_bytes >> 20} MiB that may be decoded at a time: allow more (data.decoded_limit), write "
                "smaller files, or fewer data.lanes, from the start of the run",
                stacklevel=2,
            )

    def drop(self, chunk: int) -> None:
        """A chunk is closed."""
        with self._lock:
            for key in [key for key in self._parts if key.chunk == chunk]:
                self._remove(key)
            self._let_go = {key for key in self._let_go if key.chunk != chunk}

    def _make_room(self) -> None:
        """Let go of what was used least lately; what was added last stays, and what takes nothing."""
        if self.size_bytes <= self.limit_bytes:
            return
        for key in list(self._parts)[:-1]:
            if self.size_bytes <= self.limit_bytes:
                return
            if self._parts[key].size_bytes:
                self._remove(key)
                self._let_go.add(key)

    def _remove(self, key: _Key) -> None:
        self.size_bytes -= self._parts.pop(key).size_bytes


class Parts:
    """Decoded parts of one chunk; made by :meth:`Decoded.of_chunk`. They go with it."""

    def __init__(self, decoded: Decoded, chunk: int) -> None:
        self._decoded = decoded
        self._chunk = chunk
        self._lock = threading.Lock()

    def get(self, number: int, decode: Callable[[], Sized[T]]) -> T:
        """A part by its number.

        Args:
            number: Of the part in the chunk.
            decode: Makes it, if it is not here; called by one thread at a time.
        """
        key = _Key(self._chunk, number)
        found = self._decoded.find(key)
        if found is None:
            with self._lock:
                found = self._decoded.find(key)  # another thread may have decoded it meanwhile
                if found is None:
                    found = decode()
                    self._decoded.add(key, found)
        value: T = found.value
        return value

    def drop(self) -> None:
        """The chunk is closed. Safe to call twice."""
        self._decoded.drop(self._chunk)

    def __del__(self) -> None:
        self.drop()


class _Key(NamedTuple):
    chunk: int
    number: int


def default_limit_bytes() -> int:
    """A sixteenth of the memory that this process may have: of the host's, or of its container's."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit, which says "max"
        memory_bytes = min(memory_bytes, int(_CGROUP_LIMIT.read_text()))
    return memory_bytes // _SHARE
