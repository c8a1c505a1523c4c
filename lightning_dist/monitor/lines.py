"""Records as lines of JSON, and back: pure. The format of the files under ``RUN/monitor/``.

A line is an object with a ``kind``: ``"rank"`` (who writes; first in its file), ``"step"``, ``"sample"``, ``"spans"``
(those of one step). Readers skip kinds and keys they do not know, so that later versions may add some. Numbers that
are not finite are written as ``null``.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_dist.monitor.record import VERSION, Phase, RankHeader, RunFacts, Sample, Span, StepRecord, Traffic

_Line = Mapping[str, Any]
FORMAT = "hierdist-monitor"
"""What ``run.json`` says of itself, at its beginning."""

_BEYOND = 2**63
_MOST_RANKS = 10**7  # of a run; a larger number is torn, and readers go through all of them


def header_line(header: RankHeader) -> str:
    """The first line of a file."""
    return _dumped({"kind": "rank", "version": VERSION, **dataclasses.asdict(header)})


def step_line(record: StepRecord) -> str:
    """One step; what is at its default is left out."""
    line: dict[str, Any] = {
        "kind": "step",
        "step": record.step,
        "start_ns": record.start_ns,
        "duration_s": record.duration_s,
        "phases": {phase.value: seconds for phase, seconds in record.phases.items()},
    }
    if record.communication is not None:
        line["communication"] = record.communication.__dict__
    if record.tiers:
        line["tiers"] = {tier: traffic.__dict__ for tier, traffic in record.tiers.items()}
    for name in ("micro_batches", "samples", "tokens", "batch_bytes", "counters"):
        value = getattr(record, name)
        if value is not None and value != {}:
            line[name] = value
    return _dumped(line)


def sample_line(sample: Sample) -> str:
    """One value of a metric."""
    return _dumped({"kind": "sample", **sample._asdict()})


def spans_line(step: int, spans: Iterable[Span]) -> str:
    """The timeline of one step."""
    cut = [[span.lane, span.name, span.start_ns, span.end_ns] for span in spans]
    return _dumped({"kind": "spans", "step": step, "spans": cut})


def facts_text(facts: RunFacts) -> str:
    """The content of ``run.json``."""
    return _dumped({"format": FORMAT, "version": VERSION, **dataclasses.asdict(facts)}, indent=1) + "\n"


def header_of(line: _Line) -> RankHeader:
    """Of a line of the kind ``"rank"``.

    Raises:
        KeyError, TypeError, ValueError: It is none.
    """
    known = _known(RankHeader, line)
    for name in ("rank", "local_rank", "pid", "started_wall_ns", "started_ns"):
        known[name] = _whole(known[name])
    for name in ("host", "device"):
        known[name] = str(known[name])
    for name in ("unavailable", "facts"):
        known[name] = dict(known.get(name) or {})
    return RankHeader(**known)


def step_of(line: _Line, rank: int) -> StepRecord:
    """Of a line of the kind ``"step"``.

    Raises:
        KeyError, TypeError, ValueError: It is none.
    """
    traffic = line.get("communication")
    phases = {phase.value: phase for phase in Phase}
    return StepRecord(
        step=_whole(line["step"]),
        rank=rank,
        start_ns=_whole(line["start_ns"]),
        duration_s=_seconds(line["duration_s"]),
        phases={
            phases[name]: None if seconds is None else _seconds(seconds)
            for name, seconds in line["phases"].items()
            if name in phases
        },
        communication=None if traffic is None else _traffic_of(traffic),
        tiers={str(tier): _traffic_of(each) for tier, each in (line.get("tiers") or {}).items()},
        micro_batches=_whole(line.get("micro_batches", 1)),
        samples=_count(line.get("samples")),
        tokens=_count(line.get("tokens")),
        batch_bytes=_count(line.get("batch_bytes")),
        counters={
            str(name): _finite(value) for name, value in (line.get("counters") or {}).items() if value is not None
        },
    )


def sample_of(line: _Line) -> Sample:
    """Of a line of the kind ``"sample"``.

    Raises:
        KeyError, TypeError, ValueError: It is none.
    """
    return Sample(str(line["metric"]), _whole(line["step"]), _whole(line["wall_ns"]), _finite(line["value"]))


def spans_of(line: _Line) -> list[Span]:
    """Of a line of the kind ``"spans"``.

    Raises:
        KeyError, TypeError, ValueError: It is none.
    """
    step = _whole(line["step"])
    return [Span(step, str(lane), str(name), _whole(start), _whole(end)) for lane, name, start, end in line["spans"]]


def facts_of(content: _Line) -> RunFacts:
    """Of what ``run.json`` holds.

    Raises:
        KeyError, TypeError, ValueError: It is none, or of a later version.
    """
    if content.get("format") != FORMAT:
        raise ValueError("not written by a monitor of lightning_dist")
    if int(content["version"]) > VERSION:
        raise ValueError(f"of version {content['version']}, and this release reads up to {VERSION}: take a later one")
    known = _known(RunFacts, content)
    known["world_size"] = _whole(known["world_size"])
    if not 1 <= known["world_size"] <= _MOST_RANKS:
        raise ValueError(f"a run of {known['world_size']} ranks")
    for name in ("peak_flops", "flops_per_sample"):
        known[name] = None if known.get(name) is None else _finite(known[name])
    for name in ("run_id", "started", "strategy", "config_hash", "run"):
        known[name] = str(known.get(name, ""))
    known["round"] = _whole(known.get("round", 1))
    known["record"] = None if known.get("record") is None else str(known["record"])
    for name in ("options", "versions"):
        known[name] = dict(known.get(name) or {})
    return RunFacts(**known)


def parsed(text: str) -> dict[str, Any] | None:
    """The object in a line; ``None`` for a torn line and for what is no object."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _traffic_of(line: _Line) -> Traffic:
    return Traffic(
        total_s=_seconds(line["total_s"]),
        exposed_s=_seconds(line["exposed_s"]),
        size_bytes=_count(line.get("size_bytes")),
        operations=_whole(line.get("operations", 0)),
    )


def _known(kind: type[RankHeader] | type[RunFacts], line: _Line) -> dict[str, Any]:
    names = {each.name for each in dataclasses.fields(kind)}
    return {name: value for name, value in line.items() if name in names}


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number


def _seconds(value: Any) -> float:
    """As many as 64 bits of nanoseconds hold."""
    number = _finite(value)
    if abs(number) * 1e9 >= _BEYOND:
        raise ValueError(f"{number} s are too many")
    return number


def _count(value: Any) -> int | None:
    return None if value is None else _whole(value)


def _whole(value: Any) -> int:
    """Of 64 bits: what is larger no clock and no counter says, and no table holds."""
    number = int(value)
    if not -_BEYOND <= number < _BEYOND:
        raise ValueError("a whole number is too large")
    return number


def _dumped(line: Mapping[str, Any], *, indent: int | None = None) -> str:
    separators = None if indent else (",", ":")
    try:
        return json.dumps(line, allow_nan=False, separators=separators, indent=indent, default=str)
    except ValueError:  # something is not finite
        return json.dumps(_cleaned(line), allow_nan=False, separators=separators, indent=indent, default=str)


def _cleaned(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _cleaned(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(each) for each in value]
    return value
