"""What is to be done later, by a clock that is handed in."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import NamedTuple


class _Entry(NamedTuple):
    due_s: float
    order: int
    act: Callable[[], None]


class Agenda:
    """Acts in the order of their times; one that is due acts once."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._order = itertools.count()

    def at(self, due_s: float, act: Callable[[], None]) -> None:
        """Do something at a time of the clock."""
        heapq.heappush(self._entries, _Entry(due_s, next(self._order), act))

    def run(self, now_s: float) -> None:
        """Do what is due; what that adds for now, too."""
        while self._entries and self._entries[0].due_s <= now_s:
            heapq.heappop(self._entries).act()
