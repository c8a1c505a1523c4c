"""What a launcher says of a run that it may start several times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launched:
    """A start of a run's ranks.

    Attributes:
        run: The run's name, the same for all its starts; empty: nobody says.
        round: Which start it is, from 1.
        record: Folder in which agents write down incidents; ``None``: there is none.
    """

    run: str = ""
    round: int = 1
    record: str | None = None


def launched(environ: Mapping[str, str]) -> Launched:
    """What ``hierdist launch``, torchrun or SLURM say, the first that says anything."""
    record = environ.get("HIERDIST_RECORD") or None
    for run, count, first in _NAMES:
        name = environ.get(run, "")
        if name and name != _NO_NAME:
            return Launched(name, max(1, _number(environ.get(count, "")) + 1 - first), record)
    return Launched(record=record)


_NAMES = (  # the run's name, how often it was started, and the number of its first start
    ("HIERDIST_RUN", "HIERDIST_ROUND", 1),
    ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", 0),
    ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", 0),
)
_NO_NAME = "none"  # torchrun calls runs so that were given none


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
