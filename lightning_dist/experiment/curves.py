"""What the ranks of a run write down of its loss, time and traffic, and how that becomes one curve. Pure.

Note [Lines]
    Each rank has a file of JSON lines. The first one, ``start``, says who writes; then come ``step``, one an optimizer
    step, ``validation``, and ``end`` when the fit is over. A step that is there twice, as after a restart of the ranks,
    counts as the last one says. ``seconds`` are of training only: validation is left out.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_dist.errors import RecordError

VERSION = 1
LOSS = "loss"
"""Name of the training loss, beside the metrics that validation logs."""

Line = dict[str, Any]


@dataclass(frozen=True)
class RankCurve:
    """What one rank wrote.

    Attributes:
        start: Its first line: ``rank``, ``world_size``, ``nodes``.
        steps: Number of the step, from 1 -> ``seconds``, ``loss``, and where known ``crc`` (of its batches),
            ``crossed`` (payload in bytes that went to other hosts) and ``sent`` (what the host's network devices sent).
        validations: After how many steps -> metrics.
        is_whole: Whether the fit came to its end.
    """

    start: Line
    steps: Mapping[int, Line]
    validations: Mapping[int, Mapping[str, float]]
    is_whole: bool


@dataclass(frozen=True)
class Track:
    """One metric over a run.

    Attributes:
        steps: Optimizer steps, rising.
        seconds: Of training, until then.
        values: The metric.
    """

    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    values: tuple[float, ...]

    def at_step(self, step: int) -> float:
        """The last value not later than a step; NaN: there is none."""
        return self._last([each <= step for each in self.steps])

    def at_seconds(self, seconds: float) -> float:
        """The last value not later than a moment of training; NaN: there is none."""
        return self._last([each <= seconds for each in self.seconds])

    def seconds_to(self, level: float) -> float:
        """Training until the metric was first no higher than a level; NaN: it never was."""
        return next((s for s, value in zip(self.seconds, self.values, strict=True) if value <= level), math.nan)

    def _last(self, is_early: Sequence[bool]) -> float:
        count = sum(is_early)
        return self.values[count - 1] if count else math.nan


@dataclass(frozen=True)
class Curve:
    """A run, over all the ranks that left a file.

    Attributes:
        losses: The training loss, mean of the ranks.
        validations: Each metric that validation logged.
        step_s: Seconds of each step, of the slowest rank.
        crossed_bytes: Payload that went to other hosts, of all ranks, a step, mean; ``None``: unknown, or none
            did.
        sent_bytes: What the hosts' network devices sent, a step, mean; ``None``: unknown, or one
            host.
        batches: What the first rank read at some steps, as checksums.
        ranks: How many left a file.
        world_size: How many there were.
        is_whole: Whether the fit came to its end on all of them.
    """

    losses: Track
    validations: Mapping[str, Track]
    step_s: tuple[float, ...]
    crossed_bytes: float | None
    sent_bytes: float | None
    batches: Mapping[int, int] = field(default_factory=dict)
    ranks: int = 1
    world_size: int = 1
    is_whole: bool = True

    @property
    def num_steps(self) -> int:
        """Optimizer steps."""
        return len(self.step_s)

    def track(self, metric: str) -> Track | None:
        """:data:`LOSS`, or a metric that validation logged; ``None``: it did not."""
        return self.losses if metric == LOSS else self.validations.get(metric)


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank writes."""
    return folder / f"curve-rank-{rank:05d}.jsonl"


def read_curve(folder: Path) -> Curve:
    """The run that wrote into a folder.

    Raises:
        RecordError: Nothing there is a curve, or no step was taken.
    """
    paths = sorted(folder.glob("curve-rank-*.jsonl"))
    ranks = [rank_curve(_lines(path)) for path in paths]
    ranks = [rank for rank in ranks if rank.steps]
    if not ranks:
        raise RecordError(
            f"no step was recorded in {folder}: nothing trained with a Lightning Trainer, or in a Python in which "
            "lightning-dist is not installed, or with a training_step that returns no loss"
        )
    return joined(ranks)


def _lines(path: Path) -> list[Line]:
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # the last one, of a rank that was killed
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


def rank_curve(lines: Iterable[Line]) -> RankCurve:
    """A rank's lines, in order.

    Raises:
        RecordError: They are of a later version.
    """
    start: Line = {}
    steps: dict[int, Line] = {}
    validations: dict[int, Mapping[str, float]] = {}
    is_whole = False
    for line in lines:
        kind = line.get("kind")
        if kind == "start":
            if line.get("version", 0) > VERSION:
                raise RecordError(f"a curve of version {line['version']}: it was written by a later release")
            start, is_whole = line, False
        elif kind == "step":
            steps[int(line["step"])] = line
        elif kind == "validation":
            validations[int(line["step"])] = line["metrics"]
        elif kind == "end":
            is_whole = True
    return RankCurve(start, dict(sorted(steps.items())), dict(sorted(validations.items())), is_whole)


def joined(ranks: Sequence[RankCurve]) -> Curve:
    """One curve of several ranks: of the steps that all of them have."""
    numbers = [step for step in ranks[0].steps if all(step in rank.steps for rank in ranks)]
    at = {step: [rank.steps[step] for rank in ranks] for step in numbers}
    ends = {step: max(line["seconds"] for line in lines) for step, lines in at.items()}
    losses = [statistics.fmean(line["loss"] for line in lines) for lines in at.values()]
    seconds = [ends[step] for step in numbers]
    before = [0.0, *seconds[:-1]]
    crossed = [sum(line.get("crossed", 0) for line in lines) for lines in at.values()]
    sent = [line["sent"] for lines in at.values() for line in lines if "sent" in line]
    return Curve(
        losses=Track(tuple(numbers), tuple(seconds), tuple(losses)),
        validations=_validations(ranks, ends),
        step_s=tuple(end - start for end, start in zip(seconds, before, strict=True)),
        crossed_bytes=statistics.fmean(crossed) if any(crossed) else None,
        sent_bytes=sum(sent) / len(numbers) if sent else None,
        batches={step: line["crc"] for step, line in ranks[0].steps.items() if "crc" in line},
        ranks=len(ranks),
        world_size=int(ranks[0].start.get("world_size", len(ranks))),
        is_whole=all(rank.is_whole for rank in ranks),
    )


def _validations(ranks: Sequence[RankCurve], ends: Mapping[int, float]) -> dict[str, Track]:
    """Metrics as the mean of the ranks that have them; a validation before the first step is at 0 seconds."""
    names = sorted({name for rank in ranks for metrics in rank.validations.values() for name in metrics})
    tracks = {}
    for name in names:
        values: dict[int, list[float]] = {}
        for rank in ranks:
            for step, metrics in rank.validations.items():
                if name in metrics and (step == 0 or step in ends):
                    values.setdefault(step, []).append(metrics[name])
        steps = sorted(values)
        tracks[name] = Track(
            tuple(steps),
            tuple(ends.get(step, 0.0) for step in steps),
            tuple(statistics.fmean(values[step]) for step in steps),
        )
    return tracks


def smoothed(track: Track, window: int) -> Track:
    """Means over the last ``window`` values; of fewer at the beginning."""
    sums = [0.0]
    for value in track.values:
        sums.append(sums[-1] + value)
    if not all(map(math.isfinite, track.values)):  # one of them would spoil all sums after it
        means = [statistics.fmean(track.values[max(0, end - window) : end]) for end in range(1, len(sums))]
    else:
        firsts = [max(0, end - window) for end in range(1, len(sums))]
        means = [(sums[end] - sums[first]) / (end - first) for end, first in enumerate(firsts, start=1)]
    return Track(track.steps, track.seconds, tuple(means))
