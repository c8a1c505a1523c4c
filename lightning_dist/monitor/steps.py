"""Events of one rank cut into steps; pure, in memory that does not grow with the number of steps.

Note [Innermost]
    Spans of the thread that trains are nested. An instant belongs to the innermost one around it that has a phase; what
    no span covers is ``OTHER``. So the phases of a step add up to it by construction. Validation and checkpoints keep
    all that is inside them: what a rank computes, moves and waits for there is theirs.

Note [Exposed]
    An instant is exposed communication if the training thread waits in it while an operation between ranks is under
    way. There are three kinds of waits. An operation that the training thread runs itself is one from its start to its
    end. A :data:`~lightning_dist.events.WAIT` is one for what lanes do. A :data:`TAIL`, the end of a backward after the
    last gradient, is one as far as an operation is under way. Waits count as operations under way, so that what is
    exposed is a part of the total, and the rest of it is overlapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_dist.events import WAIT, Event, EventKind
from lightning_dist.monitor.intervals import Interval, difference, intersection, length, union
from lightning_dist.monitor.record import Phase, Span, StepRecord, Traffic

TAIL = "comm.tail"
"""Name of a span: the training thread has computed all gradients and is still in backward."""

PHASE_OF_SPAN: Mapping[str, Phase] = {
    "pipeline.forward": Phase.FORWARD,
    "pipeline.loss": Phase.FORWARD,
    "pipeline.backward": Phase.BACKWARD,
    "pipeline.backward_input": Phase.BACKWARD,
    "pipeline.backward_weight": Phase.BACKWARD,
    "checkpoint copy": Phase.CHECKPOINT,
    "checkpoint copy wait": Phase.CHECKPOINT,
    "checkpoint wait": Phase.CHECKPOINT,
    "checkpoint memory wait": Phase.CHECKPOINT,
    "data.wait": Phase.DATA_WAIT,
}
"""Of the library's own spans on the training thread, which lie inside the phases that a capture sees."""

STAGE_LANES = frozenset({"activations", "gradients", "pipeline", "readers"})
"""Lanes of what the ranks of one pipeline send each other."""

_PHASES = tuple(Phase)  # going through an enumeration takes longer
_COMM = "comm."
_WHOLE = (Phase.VALIDATION, Phase.CHECKPOINT)  # they keep what is inside them
_CHECKPOINT_LANES = frozenset({"checkpoint", "checkpoints", "reading"})


class Piece(NamedTuple):
    """A stretch of the training thread.

    Attributes:
        start_ns: From when.
        end_ns: Until when.
        phase: What it does.
    """

    start_ns: int
    end_ns: int
    phase: Phase


@dataclass(frozen=True)
class Batches:
    """What was read for a step.

    Attributes:
        count: Micro-batches.
        samples: In them; ``None``: unknown.
        tokens: Likewise.
        size_bytes: Of their tensors; ``None``: unknown.
    """

    count: int = 0
    samples: int | None = None
    tokens: int | None = None
    size_bytes: int | None = None


@dataclass(frozen=True)
class CutStep:
    """A step and what it was made of.

    Attributes:
        record: The step.
        pieces: Of the training thread, in order; the gaps are ``OTHER``.
        operations: Spans on other rows.
    """

    record: StepRecord
    pieces: tuple[Piece, ...]
    operations: tuple[Event, ...]

    def spans(self) -> list[Span]:
        """The step's timeline."""
        step = self.record.step
        return [
            *(Span(step, "main", piece.phase.value, piece.start_ns, piece.end_ns) for piece in self.pieces),
            *(Span(step, event.lane, event.name, event.start_ns, event.end_ns) for event in self.operations),
        ]


class StepCutter:
    """Takes a rank's events as they come and cuts them into steps.

    Args:
        rank: Global rank.
        thread: The training thread, as :attr:`~lightning_dist.events.Event.thread` says it.
        unknown: Phases that cannot be told apart here; their record is ``None``.
        sees_communication: Whether operations between ranks are recorded; if not, the record says ``None``.
    """

    def __init__(
        self, rank: int, *, thread: int, unknown: Iterable[Phase] = (), sees_communication: bool = True
    ) -> None:
        self._rank = rank
        self._thread = thread
        self._unknown = frozenset(unknown)
        self.sees_communication = sees_communication

    def cut(
        self,
        step: int,
        start_ns: int,
        end_ns: int,
        phases: Iterable[Piece],
        events: Iterable[Event],
        batches: Batches,
    ) -> CutStep:
        """One step.

        Args:
            step: Its number.
            start_ns: Of it.
            end_ns: Of it.
            phases: What the training thread did, in the order in which it ended: inside first.
            events: That ended, or happened, in it.
            batches: What was read for it.
        """
        sorted_out = _sort_out(events, start_ns, end_ns, self._thread)
        sorted_out.main += [
            Piece(max(start, start_ns), min(end, end_ns), phase)
            for start, end, phase in phases
            if end > start_ns and start < end_ns
        ]
        whole = union((s, e) for s, e, phase in sorted_out.main if phase in _WHOLE)
        operations = [each for each in sorted_out.operations if not _is_inside(each, whole)]
        under_way = union([*((e.start_ns, e.end_ns) for e in operations), *sorted_out.waits])
        active = difference(intersection(under_way, [(start_ns, end_ns)]), whole)
        waits = [*sorted_out.waits, *intersection(union(sorted_out.tails), active)]
        # Inner spans end, and come, first; of two that are equal the one that is sorted later is the inner one.
        spans = [*reversed(sorted_out.main), *((s, e, Phase.COMMUNICATION) for s, e in waits)]
        pieces = innermost(spans, start_ns, end_ns)
        exposed = [(piece.start_ns, piece.end_ns) for piece in pieces if piece.phase is Phase.COMMUNICATION]
        traffic: Traffic | None = None
        tiers: dict[str, Traffic] = {}
        if self.sees_communication:
            traffic = _traffic(operations, active, exposed)
            tier_of = [e.attributes.get("tier") for e in operations]
            for tier in sorted({str(each) for each in tier_of if each}):
                of_tier = [e for e, each in zip(operations, tier_of, strict=True) if each == tier]
                its = intersection(union((e.start_ns, e.end_ns) for e in of_tier), active)
                is_all = its == active  # as with one tier
                tiers[tier] = _traffic(of_tier, its, exposed if is_all else intersection(exposed, its))
        record = StepRecord(
            step=step,
            rank=self._rank,
            start_ns=start_ns,
            duration_s=(end_ns - start_ns) / 1e9,
            phases=self._phases(pieces, end_ns - start_ns),
            communication=traffic,
            tiers=tiers,
            micro_batches=batches.count,
            samples=batches.samples,
            tokens=batches.tokens,
            batch_bytes=batches.size_bytes,
            counters=sorted_out.counters,
        )
        return CutStep(record, tuple(pieces), tuple(sorted_out.rows))

    def _phases(self, pieces: Iterable[Piece], duration_ns: int) -> dict[Phase, float | None]:
        nanoseconds = dict.fromkeys(_PHASES, 0)
        for start, end, phase in pieces:
            nanoseconds[phase] += end - start
        nanoseconds[Phase.OTHER] = duration_ns - sum(nanoseconds.values())
        return {
            phase: None if phase in self._unknown and not value else value / 1e9 for phase, value in nanoseconds.items()
        }


@dataclass
class _SortedOut:
    main: list[Piece]
    waits: list[Interval]
    tails: list[Interval]
    operations: list[Event]  # between ranks, but for those of stages with each other
    rows: list[Event]  # all that is not on the training thread
    counters: dict[str, float]


def _sort_out(events: Iterable[Event], start_ns: int, end_ns: int, thread: int) -> _SortedOut:
    found = _SortedOut([], [], [], [], [], {})
    for event in events:
        kind, name, _, _, _, start, end, value, _, whose = event
        if kind is not EventKind.SPAN:
            if kind is EventKind.COUNTER:
                found.counters[name] = found.counters.get(name, 0.0) + value
            continue
        start, end = max(start, start_ns), min(end, end_ns)
        if end <= start:
            continue
        if whose == thread and (phase := PHASE_OF_SPAN.get(name)) is not None:
            found.main.append(Piece(start, end, phase))
        elif name.startswith(_COMM):
            _sort_operation(found, event, (start, end), whose == thread)
        elif whose != thread:
            found.rows.append(event)
    return found


def _sort_operation(found: _SortedOut, event: Event, clipped: Interval, on_training_thread: bool) -> None:
    if event.name in (WAIT, TAIL):
        if on_training_thread:
            (found.waits if event.name == WAIT else found.tails).append(clipped)
        return
    between_stages = event.lane in STAGE_LANES
    if not between_stages and event.lane not in _CHECKPOINT_LANES:
        found.operations.append(event)
    if not on_training_thread:
        found.rows.append(event)
    elif between_stages:
        found.main.append(Piece(*clipped, Phase.PIPELINE_IDLE))
    elif event.lane not in _CHECKPOINT_LANES:
        found.waits.append(clipped)


def _is_inside(event: Event, whole: Sequence[Interval]) -> bool:
    return any(start <= event.start_ns and event.end_ns <= end for start, end in whole)


def _traffic(operations: Iterable[Event], active: Iterable[Interval], exposed: Iterable[Interval]) -> Traffic:
    sizes = [event.attributes.get("size_bytes") for event in operations]
    known = [int(size) for size in sizes if size is not None]
    return Traffic(
        total_s=length(active) / 1e9,
        exposed_s=length(exposed) / 1e9,
        size_bytes=sum(known) if known or not sizes else None,
        operations=len(sizes),
    )


def innermost(spans: Iterable[tuple[int, int, Phase]], start_ns: int, end_ns: int) -> list[Piece]:
    """Cut nested spans into pieces that do not overlap: each instant goes to the span around it that began last.

    A span that outlives the one it began in ends with it. Validation and checkpoints keep what is inside them.
    """
    pieces: list[Piece] = []
    stack: list[tuple[int, Phase]] = []  # (end, phase) of the spans around the present moment
    at = start_ns

    def advance(to: int) -> None:
        nonlocal at
        if to > at:
            if stack:
                phase = stack[-1][1]
                if pieces and pieces[-1].phase is phase and pieces[-1].end_ns == at:
                    pieces[-1] = Piece(pieces[-1].start_ns, to, phase)
                else:
                    pieces.append(Piece(at, to, phase))
            at = to

    for start, end, phase in sorted(spans, key=_outer_first):
        while stack and stack[-1][0] <= start:
            advance(stack[-1][0])
            stack.pop()
        advance(start)
        if stack:
            outer_end, outer = stack[-1]
            end = min(end, outer_end)
            phase = outer if outer in _WHOLE else phase
        stack.append((end, phase))
    while stack:
        advance(min(stack[-1][0], end_ns))
        stack.pop()
    return pieces


def _outer_first(span: tuple[int, int, Phase]) -> tuple[int, int]:
    return span[0], -span[1]
