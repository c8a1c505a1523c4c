"""Two runs that train in turn, a few steps each, so that what else the machine does meets both alike.

Both are started once. Before the first step of a block each rank waits for its run's turn; the benchmark gives it by a
file, and each rank leaves a file when its block is done. A run that waits uses next to no processor time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

BLOCK = 20
"""Steps of a turn."""
FIRST = 13
"""Step that the first block begins with; those before warm up. Snapshots every 5 steps fall within blocks, and the last
one of a block has two steps to be finished in."""
_LOOK_S = 0.01
_TURN = "turn"


class Turn:
    """A rank's part.

    Args:
        folder: That both runs and the benchmark share.
        name: Of the run.
        rank: Of this process.
    """

    def __init__(self, folder: Path, name: str, rank: int) -> None:
        self._folder, self._name, self._rank = folder, name, rank
        self._began_s = 0.0

    def before_step(self, step: int) -> None:
        """Wait for the turn, if a block begins with this step, counted from 1."""
        number, place = divmod(step - FIRST, BLOCK)
        if step < FIRST or place:
            return
        while _read(self._folder / _TURN) != f"{self._name} {number}":
            time.sleep(_LOOK_S)

    def after_step(self, step: int) -> None:
        """Note what the block took, from the end of its first step on: ranks are together by then."""
        number, place = divmod(step - FIRST, BLOCK)
        if place == 0:
            self._began_s = time.monotonic()
        elif step > FIRST and place == BLOCK - 1:
            seconds = (time.monotonic() - self._began_s) / (BLOCK - 1)
            _write(_done(self._folder, self._name, number, self._rank), repr(seconds))


def give(folder: Path, name: str, number: int) -> None:
    """It is this run's turn, with its block of that number."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / _TURN, f"{name} {number}")


def step_seconds(folder: Path, name: str, number: int, *, ranks: int) -> list[float] | None:
    """Seconds a step of a block, by rank; ``None``: not all have done it."""
    found = [_read(_done(folder, name, number, rank)) for rank in range(ranks)]
    return None if None in found else [float(text) for text in found if text is not None]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median is, 19 times out of 20, whatever the values' distribution."""
    ordered, count = sorted(values), len(values)
    reach = 0.98 * count**0.5
    low, high = int(count / 2 - reach), int(count / 2 + reach)
    return ordered[max(0, low)], ordered[min(count - 1, high)]


def _done(folder: Path, name: str, number: int, rank: int) -> Path:
    return folder / f"{name}-{number}-{rank}"


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _write(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)
