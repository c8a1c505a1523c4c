"""How a pipeline has worked: what each rank did when, how long it idled, and how long it would have had to; pure.

Clocks of different hosts do not agree. All ranks hear the report of the last stage at the same moment, up to a
message's latency, so that every rank gives its times relative to it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_dist.events import Event
from lightning_dist.laws import pipeline_bubble
from lightning_dist.parallel.pipeline.timeline import FORWARD, KINDS, Action, Slot, Timeline, predict

BATCH, LOSS = "pipeline.batch", "pipeline.loss"
_KIND_OF = {f"pipeline.{kind}": kind for kind in KINDS}
_LEFT_OUT = 2  # first batches, in which memory is allocated and shapes are found out
_MOST = 50  # batches that are reported


class OwnBatch(NamedTuple):
    """What one rank did for one batch, in seconds relative to when it heard of the batch's end.

    Attributes:
        start_s: When its schedule began.
        slots: Its work, in order; the loss of the last stage counts as forward.
    """

    start_s: float
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class PipelineReport:
    """How a pipeline has worked.

    Attributes:
        schedule: Name of the schedule.
        stages: Of each rank of the pipeline.
        ranks: Global rank of each.
        micro_batches: Of a batch.
        idle_shares: Of each rank, the part of a step's schedule in which it did nothing; median over batches.
        formula: (P-1)/(VM+P-1); see :func:`~lightning_dist.laws.pipeline_bubble`.
        predicted: Mean idle share if each rank did its work in the schedule's order, with the measured time of each
            piece of work and messages that take no time.
        batches: Number of batches that this is of.
        typical: What happened in the batch whose idle share is the median.
    """

    schedule: str
    stages: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    micro_batches: int
    idle_shares: tuple[float, ...]
    formula: float
    predicted: float
    batches: int
    typical: Timeline

    @property
    def idle_share(self) -> float:
        """Mean over ranks."""
        return statistics.fmean(self.idle_shares)

    def describe(self) -> str:
        """A few lines."""
        lines = [
            f"hierdist: pipeline of {len(self.ranks)} ranks, schedule {self.schedule}, {self.micro_batches} "
            f"micro-batches: idle {self.idle_share:.1%} of its schedule (formula {self.formula:.1%}; with the measured "
            f"times of each stage {self.predicted:.1%}; {self.batches} batches)"
        ]
        for rank, stages, idle in zip(self.ranks, self.stages, self.idle_shares, strict=True):
            lines.append(f"  rank {rank}, stage {', '.join(map(str, stages))}: idle {idle:.1%}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """The numbers, for JSON."""
        return {
            "schedule": self.schedule,
            "micro_batches": self.micro_batches,
            "batches": self.batches,
            "idle_share": self.idle_share,
            "idle_share_by_formula": self.formula,
            "idle_share_predicted": self.predicted,
            "ranks": [
                {"rank": rank, "stages": list(stages), "idle_share": idle}
                for rank, stages, idle in zip(self.ranks, self.stages, self.idle_shares, strict=True)
            ],
            "typical": {
                "length_s": self.typical.length_s,
                "rows": [
                    [[*slot.action, round(slot.start_s, 7), round(slot.end_s, 7)] for slot in row]
                    for row in self.typical.rows
                ],
            },
        }

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> PipelineReport | None:
        """What :meth:`as_dict` gave; ``None`` if it is of a version that left the typical step out.

        Raises:
            ValueError, KeyError, TypeError: It is something else.
        """
        if "typical" not in numbers:
            return None
        rows = tuple(tuple(_slot(slot) for slot in row) for row in numbers["typical"]["rows"])
        ranks = numbers["ranks"]
        if not ranks or len(rows) != len(ranks):
            raise ValueError(f"there are {len(ranks)} ranks, and rows of {len(rows)}")
        return cls(
            schedule=str(numbers["schedule"]),
            stages=tuple(tuple(map(int, each["stages"])) for each in ranks),
            ranks=tuple(int(each["rank"]) for each in ranks),
            micro_batches=int(numbers["micro_batches"]),
            idle_shares=tuple(float(each["idle_share"]) for each in ranks),
            formula=float(numbers["idle_share_by_formula"]),
            predicted=float(numbers["idle_share_predicted"]),
            batches=int(numbers["batches"]),
            typical=Timeline(rows, float(numbers["typical"]["length_s"])),
        )


def _slot(said: Sequence[Any]) -> Slot:
    kind, stage, micro_batch, start_s, end_s = said
    if kind not in KINDS:
        raise ValueError(f"a piece of work is one of {', '.join(KINDS)}, got {kind!r}")
    return Slot(Action(kind, int(stage), int(micro_batch)), float(start_s), float(end_s))


def own_batches(events: Iterable[Event]) -> list[OwnBatch]:
    """What this rank did for each of its last full batches.

    Args:
        events: Of this rank, in the order in which they ended.
    """
    work: list[Event] = []
    found: list[OwnBatch] = []
    for event in events:
        if event.name in _KIND_OF or event.name == LOSS:
            work.append(event)
        elif event.name == BATCH:
            inside = [each for each in work if each.start_ns >= event.start_ns]
            if event.attributes.get("full"):
                found.append(OwnBatch((event.start_ns - event.end_ns) / 1e9, _slots(inside, event.end_ns)))
            work = []
    return found[_LEFT_OUT:][-_MOST:] if len(found) > _LEFT_OUT else found


def _slots(work: Sequence[Event], zero_ns: int) -> tuple[Slot, ...]:
    slots = []
    last_stage = max((e.attributes["stage"] for e in work if "stage" in e.attributes), default=0)
    for event in sorted(work, key=lambda each: each.start_ns):
        stage = event.attributes.get("stage", last_stage)
        action = Action(_KIND_OF.get(event.name, FORWARD), stage, event.attributes["micro_batch"])
        slots.append(Slot(action, (event.start_ns - zero_ns) / 1e9, (event.end_ns - zero_ns) / 1e9))
    return tuple(slots)


def merge(batches: Sequence[OwnBatch]) -> Timeline:
    """One batch as all ranks saw it, from the start of the first schedule to the end of the last work.

    Args:
        batches: Of each rank.
    """
    start = min(batch.start_s for batch in batches)
    end = max((slot.end_s for batch in batches for slot in batch.slots), default=start)
    rows = [
        tuple(Slot(slot.action, slot.start_s - start, slot.end_s - start) for slot in batch.slots) for batch in batches
    ]
    return Timeline(tuple(rows), end - start)


def make_report(
    by_rank: Sequence[Sequence[OwnBatch]],
    *,
    schedule: str,
    orders: Sequence[Sequence[Action]],
    stages: Sequence[Sequence[int]],
    ranks: Sequence[int],
    micro_batches: int,
) -> PipelineReport | None:
    """The report of some batches; ``None`` if there was none.

    Args:
        by_rank: The same batches of each rank, in order.
        schedule: Name of the schedule.
        orders: What each rank does, in its order.
        stages: Of each rank.
        ranks: Global rank of each.
        micro_batches: Of a batch.
    """
    count = min(map(len, by_rank))
    if not count:
        return None
    timelines = [merge([own[len(own) - count + i] for own in by_rank]) for i in range(count)]
    by_idle = sorted(timelines, key=lambda timeline: timeline.idle_share)
    shares = [statistics.median(t.idle_shares[i] for t in timelines) for i in range(len(ranks))]
    return PipelineReport(
        schedule=schedule,
        stages=tuple(map(tuple, stages)),
        ranks=tuple(ranks),
        micro_batches=micro_batches,
        idle_shares=tuple(shares),
        formula=pipeline_bubble(len(ranks), micro_batches, virtual_stages=len(stages[0])),
        predicted=predict(orders, _typical_seconds(timelines)).idle_share,
        batches=count,
        typical=by_idle[len(by_idle) // 2],
    )


def _typical_seconds(timelines: Sequence[Timeline]) -> dict[tuple[str, int], float]:
    """(kind, stage) -> median time of a piece of work; what is in two pieces, as forward and loss, is added up."""
    taken: dict[tuple[str, int], list[float]] = {}
    for timeline in timelines:
        for row in timeline.rows:
            whole: dict[Action, float] = {}
            for slot in row:
                whole[slot.action] = whole.get(slot.action, 0.0) + slot.end_s - slot.start_s
            for action, seconds in whole.items():
                taken.setdefault((action.kind, action.stage), []).append(seconds)
    return {key: statistics.median(seconds) for key, seconds in taken.items()}
