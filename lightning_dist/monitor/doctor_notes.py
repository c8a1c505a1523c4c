"""What ranks tell the doctor that started them: who they are, and where they write."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_dist.monitor.doctor_order import DoctorOrder
from lightning_dist.monitor.rank_file import rank_path


@dataclass(frozen=True)
class DoctorNote:
    """A rank that has begun to train.

    Attributes:
        rank: Global rank.
        world_size: Of its run.
        record: Where the run's files go, as rank 0 said: on another host there may be no such folder.
        scratch: Where rank 0's script writes meanwhile; checkpoints of all ranks go there.
    """

    rank: int
    world_size: int
    record: str
    scratch: str

    @property
    def has_steps(self) -> bool:
        """Whether it has recorded any: none of a fit that only looked for a learning rate and gave it back."""
        path = rank_path(Path(self.record), "steps", self.rank)
        return path.is_file() and path.stat().st_size > 0


@dataclass(frozen=True)
class Examined:
    """The fit that was examined, as a doctor's own ranks tell it.

    Attributes:
        record: Where its files are.
        scratch: Where rank 0's script wrote.
        world_size: How many ranks it had.
        ranks: Those that this doctor's command started.
    """

    record: Path
    scratch: Path
    world_size: int
    ranks: tuple[int, ...]

    @property
    def has_rank_0(self) -> bool:
        """Whether this doctor is the one who says the verdict."""
        return 0 in self.ranks

    @property
    def has_all_ranks(self) -> bool:
        """Whether no other doctor has ranks of it."""
        return len(self.ranks) == self.world_size


def leave(order: DoctorOrder, note: DoctorNote) -> None:
    """Leave a note for the doctor.

    Raises:
        OSError: Its folder cannot be written to.
    """
    order.notes.mkdir(parents=True, exist_ok=True)
    path = order.notes / f"{time.time_ns():020d}-{note.rank:05d}.json"
    fresh = path.with_suffix(".part")
    fresh.write_text(json.dumps(asdict(note)), encoding="utf-8")
    fresh.replace(path)


def notes_of(order: DoctorOrder) -> list[DoctorNote]:
    """All that were left, in order of time."""
    return [DoctorNote(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(order.notes.glob("*.json"))]


def examined(notes: Sequence[DoctorNote]) -> Examined | None:
    """The last fit that recorded steps; ``None``: there was none."""
    last = next((note for note in reversed(notes) if note.has_steps), None)
    if last is None:
        return None
    ranks = {note.rank for note in notes if note.record == last.record}
    return Examined(Path(last.record), Path(last.scratch), last.world_size, tuple(sorted(ranks)))
