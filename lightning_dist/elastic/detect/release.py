"""Frees a rank that waits for others, when the agent of its host says so.

A thread looks at the cell ten times a second. It needs the GIL, which a thread that is blocked in a collective does not
hold; a rank that holds it for good is killed by the agent instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from lightning_dist.elastic.detect.board import Cell
from lightning_dist.elastic.detect.phases import Order

LOOK_S = 0.1


class ReleaseWatch:
    """Waits for the order in a thread, until it is closed.

    Args:
        cell: This rank's.
        round: Orders of other rounds are not meant.
        free: Called once, in the thread, with the reason in words; ends every wait for other ranks.
    """

    def __init__(self, cell: Cell, *, round: int, free: Callable[[str], None]) -> None:  # noqa: A002  # the field's word
        self._cell = cell
        self._round = round
        self._free = free
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hierdist-release", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        self._ending.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(LOOK_S):
            if self._cell.ordered() == (Order.RELEASE, self._round):
                why = self._cell.ordered_why()
                self._free("the agent of this host ends the round" + (f": {why}" if why else ""))
                return
