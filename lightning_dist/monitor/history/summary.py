"""The small record of a run that outlives its files. Pure.

Note [versions]
    A record says which version of this form it is in. Readers take all versions up to theirs: each step of
    ``_UPGRADES`` makes a record of one version into one of the next. Keys that a reader does not know are ignored, so
    that adding one needs no new version.

    - 0: metrics were plain medians: ``{"step": 0.02}``; the configuration's hash was called ``config``.
    - 1: metrics have unit, mean, spread, count and blocks.
    - 2: blocks of what comes in bursts are means (``of_means``), not only of what is mostly 0.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from lightning_dist.errors import RecordError
from lightning_dist.monitor.goodput import goodput
from lightning_dist.monitor.history.blocks import in_blocks
from lightning_dist.monitor.history.series import KINDS, run_series
from lightning_dist.monitor.record import RunRecord
from lightning_dist.monitor.rounds import WholeRun
from lightning_dist.monitor.verdict import Verdict

VERSION = 2


@dataclass(frozen=True)
class MetricSummary:
    """One metric of a run.

    Attributes:
        median: Of its values.
        mean: Likewise.
        spread: Between their quartiles.
        count: How many there are.
        unit: Of all of them.
        block_length: Values a block.
        blocks: A value for each block that is nearly independent of the others, in order of time.
        of_means: Whether these are means, not medians.
    """

    median: float
    mean: float
    spread: float = 0.0
    count: int = 0
    unit: str = ""
    block_length: int = 1
    blocks: tuple[float, ...] = ()
    of_means: bool = False


@dataclass(frozen=True)
class RunSummary:
    """What is kept of a run.

    Attributes:
        run_id: Unique.
        started: ISO 8601, with the offset.
        strategy: Its name.
        world_size: Ranks.
        hosts: Hosts.
        host_kind: The hosts' processors, cores and GPUs, in words; runs on other kinds are not compared unasked.
        config_hash: Of ``options``.
        options: The configuration, flat.
        commit: Of the user's repository; ``None``: none.
        versions: Of Python and the libraries.
        steps: Optimizer steps that were seen.
        metrics: By name; see :data:`~lightning_dist.monitor.history.series.KINDS`.
        cause: The verdict's main cause, e.g. ``"data_pipeline"``; ``None``: no verdict.
        cause_share: Its share of the step.
        verdict: In a sentence, also why there is none.
        rounds: How often its ranks were started; the figures are those of the round with the most steps.
        incidents: How many were written down.
        steps_lost: Steps that were done again.
        goodput: Time in steps that stand over wall time; ``None``: unknown.
    """

    run_id: str
    started: str
    strategy: str = ""
    world_size: int = 1
    hosts: int = 1
    host_kind: str = ""
    config_hash: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    commit: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    steps: int = 0
    metrics: Mapping[str, MetricSummary] = field(default_factory=dict)
    cause: str | None = None
    cause_share: float | None = None
    verdict: str = ""
    rounds: int = 1
    incidents: int = 0
    steps_lost: int = 0
    goodput: float | None = None

    def is_like(self, other: RunSummary) -> bool:
        """Whether it has the same configuration, ranks and kind of hosts."""
        return self.likeness == other.likeness

    @property
    def moment(self) -> datetime:
        """When it began; runs that do not say are the oldest."""
        try:
            moment = datetime.fromisoformat(self.started)
        except ValueError:
            return datetime.min.replace(tzinfo=timezone.utc)
        return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)

    @property
    def likeness(self) -> tuple[str, int, str]:
        """What runs that may be compared share."""
        return self.config_hash, self.world_size, self.host_kind


def summarise(record: RunRecord, verdict: Verdict | None = None, *, whole: WholeRun | None = None) -> RunSummary:
    """The record of a run.

    Args:
        record: The run, or the round of it that the verdict is about.
        verdict: What the diagnosis says of it.
        whole: The run with all its rounds, if it has more than one.
    """
    of = goodput(WholeRun((record,)) if whole is None else whole)
    facts, headers = record.facts, [rank.header for rank in record.ranks.values()]
    main = verdict.main if verdict is not None else None
    said = main.summary if main is not None else (verdict.no_verdict or "") if verdict is not None else ""
    return RunSummary(
        run_id=facts.run_id,
        started=facts.started,
        strategy=facts.strategy,
        world_size=facts.world_size,
        hosts=len({header.host for header in headers}) or 1,
        host_kind=_host_kind(record),
        config_hash=facts.config_hash,
        options=facts.options,
        commit=facts.commit,
        versions=facts.versions,
        steps=of.steps,
        metrics={name: _metric(name, values) for name, values in run_series(record).items()},
        cause=None if main is None else main.cause.value,
        cause_share=None if main is None else main.share,
        verdict=said,
        rounds=of.rounds,
        incidents=of.incidents,
        steps_lost=of.steps_lost,
        goodput=of.share,
    )


def to_json(summary: RunSummary) -> dict[str, Any]:
    """As plain values."""
    plain = {name: getattr(summary, name) for name in _PLAIN}
    metrics = {name: {**vars(metric), "blocks": list(metric.blocks)} for name, metric in summary.metrics.items()}
    return {"version": VERSION, **plain, "metrics": metrics}


def from_json(values: Any) -> RunSummary:
    """Read a record of this version or an earlier one.

    Raises:
        RecordError: It is none, or one of a later version.
    """
    version = values.get("version") if isinstance(values, dict) else None
    if not isinstance(version, int) or version < 0:
        raise RecordError("it is no record of a run: it has no version")
    if version > VERSION:
        raise RecordError(f"it is of version {version}, this lightning_dist reads up to {VERSION}: take a newer one")
    try:
        for step in range(version, VERSION):
            values = _UPGRADES[step](values)
        metrics = {str(name): _metric_from(metric) for name, metric in values["metrics"].items()}
        return RunSummary(**{**_checked(_known(values, RunSummary)), "metrics": metrics})
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RecordError(f"it is no record of a run: {error}") from error


def _metric_from(values: Mapping[str, Any]) -> MetricSummary:
    known = _known(values, MetricSummary)
    for name in known.keys() & {"median", "mean", "spread"}:
        known[name] = _finite(known[name])
    for name in known.keys() & {"count", "block_length"}:
        known[name] = int(known[name])
    known["of_means"] = bool(known.get("of_means", False))
    if "unit" in known:
        known["unit"] = _text(known["unit"])
    return MetricSummary(**{**known, "blocks": tuple(map(_finite, known.get("blocks", ())))})


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """What a record says of its run, each of the type that the rest relies on."""
    for name in ("run_id", "started"):
        values[name] = _text(values[name])
    for name in ("strategy", "host_kind", "config_hash", "verdict"):
        values[name] = _text(values.get(name, ""))
    for name in ("commit", "cause"):
        values[name] = None if values.get(name) is None else _text(values[name])
    for name, least in _COUNTS:
        values[name] = int(values.get(name, least))
    values["goodput"] = None if values.get("goodput") is None else _finite(values["goodput"])
    for name in ("options", "versions"):
        values[name] = dict(values.get(name) or {})
    return values


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number


def _from_version_0(values: dict[str, Any]) -> dict[str, Any]:
    metrics = {
        name: {"median": median, "mean": median, "unit": KINDS[name].unit if name in KINDS else ""}
        for name, median in values.get("metrics", {}).items()
    }
    return {**values, "metrics": metrics, "config_hash": values.get("config", "")}


def _from_version_1(values: dict[str, Any]) -> dict[str, Any]:
    metrics = values["metrics"].items()
    return {**values, "metrics": {name: {**metric, "of_means": name in _MEANS_IN_1} for name, metric in metrics}}


_COUNTS = (("world_size", 1), ("hosts", 1), ("steps", 0), ("rounds", 1), ("incidents", 0), ("steps_lost", 0))
_MEANS_IN_1 = (
    *("phase.checkpoint", "phase.validation", "checkpoint_stall", "heartbeat_timeouts"),
    *("tcp_retransmits", "tcp_retransmits_per_step", "rdma_retransmits"),
)
_UPGRADES: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = {0: _from_version_0, 1: _from_version_1}
_PLAIN = tuple(name for name in RunSummary.__dataclass_fields__ if name != "metrics")


def _known(values: Mapping[str, Any], kind: type[MetricSummary | RunSummary]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in kind.__dataclass_fields__}


def _metric(name: str, values: tuple[float, ...]) -> MetricSummary:
    kind = KINDS[name]
    blocks = in_blocks(values, of_means=kind.is_bursty)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return MetricSummary(
        median=statistics.median(values),
        mean=statistics.fmean(values),
        spread=high - low,
        count=len(values),
        unit=kind.unit,
        block_length=blocks.length,
        blocks=blocks.values,
        of_means=kind.is_bursty,
    )


def _host_kind(record: RunRecord) -> str:
    """E.g. ``2 x 8 cores of AMD EPYC 7763, 4 GPUs each: NVIDIA H100``; hosts that are alike are counted."""
    kinds: Counter[str] = Counter()
    by_host: dict[str, list[int]] = {}
    for number, rank in sorted(record.ranks.items()):
        by_host.setdefault(rank.header.host, []).append(number)
    for numbers in by_host.values():
        facts = record.ranks[numbers[0]].header.facts
        cpu = f"{facts.get('cpu_cores') or '?'} cores of {facts.get('cpu_model') or 'an unknown processor'}"
        gpus = Counter(
            device.partition(" ")[2] or "GPU"
            for device in (record.ranks[number].header.device for number in numbers)
            if not device.startswith("cpu")
        )
        kinds[", ".join([cpu, *(f"{count} x {name}" for name, count in sorted(gpus.items()))])] += 1
    return "; ".join(kind if count == 1 else f"{count} hosts of {kind}" for kind, count in sorted(kinds.items()))
