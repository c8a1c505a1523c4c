"""What ``hierdist doctor`` asks of the processes that it starts, as the value of a variable of theirs."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path

VARIABLE = "HIERDIST_DOCTOR"  # hierdist_doctor_hook.py looks for it


@dataclass(frozen=True)
class DoctorOrder:
    """How long to train, and where everything goes.

    Attributes:
        folder: Of this examination.
        steps: Optimizer steps after which training ends.
        minutes: Minutes after which it ends at the latest.
        token: Of this doctor: those of other hosts may have the same folder.
    """

    folder: str
    steps: int
    minutes: float
    token: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    @property
    def record(self) -> Path:
        """Where the run's files go."""
        return Path(self.folder) / "monitor"

    @property
    def scratch(self) -> Path:
        """Where the script's own outputs go, on all hosts: they may write one checkpoint together.

        Removed at the end, so that nobody else's folder may have its name.
        """
        return Path(self.folder) / "hierdist-doctor-scratch"

    @property
    def notes(self) -> Path:
        """Where the ranks that the command started leave their notes; removed at the end."""
        return Path(self.folder) / f"hierdist-doctor-notes-{self.token}"

    def to_text(self) -> str:
        """As a variable's value."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> DoctorOrder:
        """Back from it."""
        return cls(**json.loads(text))
