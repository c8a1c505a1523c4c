"""Decoded row groups of all files that are read from by turns."""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter, OrderedDict
from contextlib import AbstractContextManager
from typing import Any

from lightning_dist.data.formats.columns import Rows

_FEWEST = 2
"""Of a file, whatever they take."""
_SHARE = 16
"""Of the host's memory one process takes that part: with eight ranks, half of it."""

Key = tuple[int, int]
"""Number of an open file, and of the row group in it."""


class HeldGroups:
    """Row groups, as long as they fit. Any thread may use it; a copy in another process begins empty.

    A lane of the order takes the samples of a file in no order, so each sample may be of another row group, and what
    is not held is decoded for one sample.

    Args:
        limit_bytes: Of all together; beyond it two of each file are held, those used last.

    Attributes:
        size_bytes: What they take.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes if limit_bytes is not None else _memory_bytes() // _SHARE
        self._empty()

    def get(self, key: Key) -> Rows | None:
        """A row group, if it is held."""
        with self._mine():
            found = self._groups.get(key)
            if found is not None:
                self._groups.move_to_end(key)
            return found

    def put(self, key: Key, rows: Rows) -> None:
        """Hold one that was just decoded."""
        with self._mine():
            is_again = key in self._let_go and not self._has_warned
            self._groups[key] = rows
            self.size_bytes += rows.size_bytes
            self._of_file[key[0]] += 1
            self._make_room()
            self._has_warned |= is_again
        if is_again:
            warnings.warn(
                "row groups of Parquet files are decoded again and again, since those of the files that are read by "
                f"turns take more than the {self._limit_bytes >> 20} MiB that are held in a process: write smaller "
                "files, one row group each, or fewer data.lanes, from the start of the run",
                stacklevel=2,
            )

    def drop(self, file: int) -> None:
        """A file is closed."""
        with self._mine():
            for key in [key for key in self._groups if key[0] == file]:
                self._remove(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return HeldGroups, (self._limit_bytes,)

    def _mine(self) -> AbstractContextManager[Any]:
        if self._pid != os.getpid():  # in a forked child, for whose parent another thread may have held the lock
            self._empty()
        return self._lock

    def _empty(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a file may be collected, and so dropped, at any allocation
        self._groups: OrderedDict[Key, Rows] = OrderedDict()
        self._of_file: Counter[int] = Counter()
        self._let_go: set[Key] = set()
        self.size_bytes = 0
        self._has_warned = False

    def _make_room(self) -> None:
        for key in list(self._groups) if self.size_bytes > self._limit_bytes else ():
            if self.size_bytes <= self._limit_bytes:
                return
            if key in self._groups and self._of_file[key[0]] > _FEWEST:
                self._remove(key)
                self._let_go.add(key)

    def _remove(self, key: Key) -> None:
        self.size_bytes -= self._groups.pop(key).size_bytes
        self._of_file[key[0]] -= 1


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
