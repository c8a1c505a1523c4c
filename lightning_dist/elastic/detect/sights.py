"""What an agent sees of its ranks: their cells of the board, and what the kernel says of their processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from lightning_dist.elastic.detect.board import Board
from lightning_dist.elastic.detect.watch import Sight
from lightning_dist.elastic.policy.events import Progress


def look_at(board: Board) -> list[Sight]:
    """Each rank of a host, for :meth:`~lightning_dist.elastic.detect.watch.Watch.look`."""
    sights = []
    for index in range(board.num_cells):
        cell = board.cell(index)
        beat = cell.read()
        sights.append(Sight(beat, cell.read_mark(), beat is not None and is_stopped(beat.pid)))
    return sights


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal; one that is gone, or in a debugger's hands, is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state == "T"


def progress_of(sights: Sequence[Sight], *, host: str) -> Progress | None:
    """How a host gets on; ``None`` where a rank has not yet done a step, or nobody knows for whom it waited."""
    beats = [sight.beat for sight in sights if sight.beat is not None]
    if not beats or len(beats) < len(sights) or any(beat.step < 0 or math.isnan(beat.own_s) for beat in beats):
        return None
    return Progress(host, beats[0].round, min(beat.step for beat in beats), tuple(beat.own_s for beat in beats))
