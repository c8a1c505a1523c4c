"""The steps that are judged, of all ranks, as tables: rows are ranks, columns steps.

Note: who sets the pace.
    Ranks that train together take equally long for a step: those that are done early wait for the others, in
    communication or, in a pipeline, for a neighbour. What a rank does itself is the rest, its own time. The rank that
    waits least in a step is the one that the others wait for, and its phases say what the step was spent on: along this
    path, what it still waits is what communication really takes, and waiting for each other is not counted as
    communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_dist.monitor.diagnosis import wording
from lightning_dist.monitor.record import Phase, RankRecord, RunRecord, StepRecord, Traffic

Floats = NDArray[np.float64]

WAITING = (Phase.COMMUNICATION, Phase.PIPELINE_IDLE)

MIN_STEPS = 10  # with fewer, one odd step is a tenth of the time
WARM_UP_STEPS = 3  # compiling, first batches of the workers, DistributedDataParallel's second layout of buckets
WARM_UP_SHARE = 0.1  # of the steps, where that is more: caches fill
MOST_WARM_UP_STEPS = 50
LONGEST_STEP_S = 1e6  # 12 days: a clock that jumped, not a step
KNOWN_SHARE = 0.9  # of a phase's values; with fewer it counts as not measured


@dataclass(frozen=True, eq=False)
class TrafficTable:
    """What was communicated; what is unknown is NaN."""

    total_s: Floats
    exposed_s: Floats
    size_bytes: Floats
    operations: Floats


@dataclass(frozen=True, eq=False)
class Window:
    """Steps of a run, warm-up left out.

    Attributes:
        ranks: Of the rows.
        hosts: Theirs.
        steps: Numbers of the columns.
        duration_s: Of each rank and step.
        phases: Of those phases that were measured.
        communication: Of all tiers; ``None``: not measured.
        tiers: By tier.
        batch_bytes: Of the batches; NaN where unknown.
        missing: What could not be looked at, and why.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    steps: tuple[int, ...]
    duration_s: Floats
    phases: Mapping[Phase, Floats]
    communication: TrafficTable | None
    tiers: Mapping[str, TrafficTable]
    batch_bytes: Floats
    missing: tuple[str, ...] = ()

    @cached_property
    def waiting_s(self) -> Floats:
        """How long each rank waited for others."""
        waiting = np.zeros_like(self.duration_s)
        for phase in WAITING:
            if phase in self.phases:
                waiting = waiting + self.phases[phase]
        return np.minimum(waiting, self.duration_s)

    @cached_property
    def own_s(self) -> Floats:
        """What each rank did itself."""
        return self.duration_s - self.waiting_s

    @cached_property
    def pace(self) -> NDArray[np.intp]:
        """Row of the rank that each step's others waited for."""
        return np.asarray(np.argmax(self.own_s - self.waiting_s, axis=0), dtype=np.intp)

    @cached_property
    def step_s(self) -> Floats:
        """How long each step took, along the path."""
        return self.along(self.duration_s)

    @cached_property
    def path(self) -> Mapping[Phase, Floats]:
        """Seconds of each phase in each step, along the path."""
        return {phase: self.along(table) for phase, table in self.phases.items()}

    @property
    def total_s(self) -> float:
        """How long all steps took."""
        return float(self.step_s.sum())

    def along(self, table: Floats) -> Floats:
        """The values of the ranks that set the pace."""
        return np.asarray(np.take_along_axis(table, self.pace[np.newaxis, :], axis=0)[0], dtype=np.float64)

    def share(self, cost_s: Floats) -> float:
        """What a cost in each step is of all time; between 0 and 1."""
        return min(max(float(cost_s.sum()) / self.total_s, 0.0), 1.0)


@dataclass(frozen=True)
class NoWindow:
    """There is nothing to judge.

    Attributes:
        reason: Why not.
        steps: How many there were.
        missing: As in :class:`Window`.
    """

    reason: str
    steps: int = 0
    missing: tuple[str, ...] = ()


def window_of(record: RunRecord) -> Window | NoWindow:
    """The steps that all ranks have, without those of the warm-up."""
    by_rank = {rank: _sound_steps(each) for rank, each in sorted(record.ranks.items())}
    missing = list(record.problems)
    kept = {rank: steps for rank, steps in by_rank.items() if steps}
    if not kept:
        return NoWindow("no rank has recorded a step", missing=tuple(missing))
    usual = sorted(map(len, kept.values()))[len(kept) // 2]
    short = [rank for rank, steps in kept.items() if len(steps) < usual / 2]
    if short:
        missing.append(f"{wording.ranks(short)} recorded less than half of the steps of the others, and were left out")
        kept = {rank: steps for rank, steps in kept.items() if rank not in set(short)}
    common = sorted(set.intersection(*(set(steps) for steps in kept.values())))
    warm_up = max(WARM_UP_STEPS, min(MOST_WARM_UP_STEPS, int(WARM_UP_SHARE * len(common))))
    judged = common[warm_up:]
    if len(judged) < MIN_STEPS:
        return NoWindow(
            f"{len(common)} steps that all ranks recorded are too few: the first {warm_up} warm up, and at least "
            f"{MIN_STEPS} more are needed",
            steps=len(judged),
            missing=tuple(missing),
        )
    return _tables({rank: record.ranks[rank] for rank in kept}, kept, judged, missing)


def _sound_steps(record: RankRecord) -> dict[int, StepRecord]:
    """By number; the later one where a number occurs twice, as after a resume."""
    return {step.step: step for step in record.steps if 0 < step.duration_s < LONGEST_STEP_S}


def _tables(
    ranks: Mapping[int, RankRecord], kept: Mapping[int, Mapping[int, StepRecord]], judged: list[int], missing: list[str]
) -> Window:
    steps = [kept[rank][step] for rank in ranks for step in judged]
    shape = (len(ranks), len(judged))
    duration_s = _table([step.duration_s for step in steps], shape)
    phases: dict[Phase, Floats] = {}
    for phase, table in zip(Phase, _phase_tables(steps, shape), strict=True):
        if np.isfinite(table).mean() >= KNOWN_SHARE:
            phases[phase] = np.minimum(np.nan_to_num(table, nan=0.0), duration_s)
        else:
            missing.append(_unmeasured(phase, ranks))
    traffic = [step.communication for step in steps]
    known = sum(each is not None for each in traffic)
    tiers: dict[str, None] = dict.fromkeys(name for step in steps if step.tiers for name in step.tiers)
    return Window(
        ranks=tuple(ranks),
        hosts=tuple(record.header.host for record in ranks.values()),
        steps=tuple(judged),
        duration_s=duration_s,
        phases=phases,
        communication=_traffic_table(traffic, shape) if known >= KNOWN_SHARE * duration_s.size else None,
        tiers={name: _traffic_table([step.tiers.get(name) for step in steps], shape) for name in sorted(tiers)},
        batch_bytes=_table([step.batch_bytes for step in steps], shape),
        missing=tuple(missing),
    )


def _phase_tables(steps: Sequence[StepRecord], shape: tuple[int, int]) -> list[Floats]:
    """One for each phase, in order."""
    order = tuple(Phase)
    # Most steps hold all phases in order, and a look at each by its name would take most of the time of 10,000 ranks.
    rows = [
        tuple(step.phases.values()) if tuple(step.phases) == order else tuple(map(step.phases.get, order))
        for step in steps
    ]
    return [_table(column, shape) for column in zip(*rows, strict=True)]


def _traffic_table(traffic: Sequence[Traffic | None], shape: tuple[int, int]) -> TrafficTable:
    unknown = (None, None, None, None)
    rows = [
        unknown if each is None else (each.total_s, each.exposed_s, each.size_bytes, each.operations)
        for each in traffic
    ]
    return TrafficTable(*(_table(column, shape) for column in zip(*rows, strict=True)))


def _table(values: Sequence[float | None], shape: tuple[int, int]) -> Floats:
    """NaN for what is unknown and for what cannot be: a time or size is finite and not negative."""
    table = np.array(values, dtype=np.float64).reshape(shape)
    table[~np.isfinite(table) | (table < 0)] = np.nan
    return table


def _unmeasured(phase: Phase, ranks: Mapping[int, RankRecord]) -> str:
    why = next(
        (
            record.header.unavailable[phase.value]
            for record in ranks.values()
            if phase.value in record.header.unavailable
        ),
        "not recorded",
    )
    return f"{phase.value.replace('_', ' ')}: {why}"
