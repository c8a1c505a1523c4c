"""What went wrong in a run, and what it cost; a line of JSON each, beside the run's other files.

The leader of the agents writes them, and the run's report, its history and ``hierdist report`` read them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_dist.errors import RecordError

FILE = "incidents.jsonl"
PHASES = ("detect", "takeover", "stop", "regroup", "start", "load", "first_step")
"""What passes from a failure to the next step that is done, in this order."""


@dataclass(frozen=True)
class Incident:
    """One change of who trains.

    Attributes:
        number: From 1, in the order of time.
        what: A :class:`~lightning_dist.elastic.policy.events.Cause`, or ``regrown``.
        who: Ranks and hosts, for people.
        detail: What was seen: an exit code, the last collective, a health check.
        time: When it was noticed, seconds since the epoch.
        action: ``restarted``, ``degraded``, ``regrown``, ``waited`` or ``ended``.
        seconds: By phase of :data:`PHASES`; what was not measured is not there.
        step_before: The newest step that was done before; ``None``: unknown.
        step_after: The step that training went on from.
        ranks_before: Number of ranks.
        ranks_after: Likewise; 0 if the run ended.
        lost_ranks: Global ranks that failed.
        blamed_host: The host it began on.
        run: The run's name; empty: there is no other in this folder.
    """

    number: int
    what: str
    who: str
    detail: str
    time: float
    action: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    step_before: int | None = None
    step_after: int | None = None
    ranks_before: int = 0
    ranks_after: int = 0
    lost_ranks: tuple[int, ...] = ()
    blamed_host: str | None = None
    run: str = ""

    @property
    def total_s(self) -> float:
        """From the failure to the next step that was done."""
        return sum(self.seconds.values())

    @property
    def steps_lost(self) -> int | None:
        """Steps that were done twice; ``None``: unknown."""
        if self.step_before is None or self.step_after is None:
            return None
        return max(0, self.step_before - self.step_after)


def to_line(incident: Incident) -> str:
    """One line of JSON, without its end."""
    return json.dumps(asdict(incident), allow_nan=False)


def from_json(value: Any) -> Incident:
    """Fields that a later version has added are left out.

    Raises:
        RecordError: It is no incident.
    """
    try:
        known = {name: value[name] for name in Incident.__dataclass_fields__ if name in value}
        known["lost_ranks"] = tuple(int(rank) for rank in known.get("lost_ranks", ()))
        known["seconds"] = {str(name): float(seconds) for name, seconds in dict(known.get("seconds", {})).items()}
        return Incident(**known)
    except (TypeError, ValueError, KeyError) as error:
        raise RecordError(f"this is no incident: {value!r} ({error})") from error


def read(folder: Path) -> Sequence[Incident]:
    """Incidents of a run, the newest line of each number; a torn last line is left out. Empty if there is no file.

    Raises:
        RecordError: A line that is not the last cannot be read.
    """
    path = folder / FILE
    if not path.exists():
        return ()
    lines = path.read_text(encoding="utf-8").split("\n")
    found: dict[int, Incident] = {}
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            incident = from_json(json.loads(line))
        except (ValueError, RecordError) as error:
            if index == len(lines) - 1:  # its writer was killed in the middle of it
                continue
            raise RecordError(f"{path}, line {index + 1}: {error}") from error
        found[incident.number] = incident
    return tuple(found[number] for number in sorted(found))
