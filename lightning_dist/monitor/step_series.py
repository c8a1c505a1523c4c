"""Series that come from steps: waits and shares a step, and what checkpoints cost."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from lightning_dist.events import Event
from lightning_dist.monitor.record import Phase, StepRecord
from lightning_dist.monitor.sampling.source import Reading

_MOST = 100_000  # steps between two looks; what comes then is forgotten


class StepSource:
    """Data wait and communication of the steps since the last time, in the mean; each checkpoint that held one.

    Any thread may hand it steps.

    Args:
        writes_at_once: Whether a checkpoint is written while training stands still, so that the stall is all.
    """

    metrics = (
        "data_wait",
        "communication_share",
        "exposed_communication_share",
        "checkpoint_stall",
        "checkpoint_write",
    )
    is_fine = False

    def __init__(self, *, writes_at_once: bool) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=_MOST)
        self._writes_at_once = writes_at_once

    def take(self, record: StepRecord) -> None:
        """A step has ended."""
        self._steps.append(record)

    def read(self, now_ns: int) -> list[Reading]:
        """Since the last time."""
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        return [*mean_readings(steps), *self._checkpoints(steps, now_ns)]

    def close(self) -> None:
        """Nothing is held."""

    def _checkpoints(self, steps: Sequence[StepRecord], now_ns: int) -> Iterator[Reading]:
        for record in steps:
            stall_s = record.phases.get(Phase.CHECKPOINT)
            if stall_s:
                wall_ns = time.time_ns() - (now_ns - record.end_ns)
                yield Reading("checkpoint_stall", stall_s, wall_ns, record.step)
                if self._writes_at_once:
                    yield Reading("checkpoint_write", stall_s, wall_ns, record.step)


class CheckpointWriteSource:
    """How long checkpoints took that are written in the background, until they are committed.

    Args:
        event: Name of the span of a write.
        steps: How many steps there were by now; streams of callbacks do not know it.
    """

    metrics = ("checkpoint_write",)
    is_fine = False

    def __init__(self, event: str, *, steps: Callable[[], int]) -> None:
        self._event = event
        self._steps = steps
        self._writes: deque[tuple[int, Event]] = deque(maxlen=_MOST)

    def take(self, event: Event) -> None:
        """A sink of an event stream."""
        if event.name == self._event:
            self._writes.append((self._steps(), event))

    def read(self, now_ns: int) -> list[Reading]:
        """Since the last time."""
        writes = [self._writes.popleft() for _ in range(len(self._writes))]
        now_wall_ns = time.time_ns()
        return [
            Reading("checkpoint_write", write.duration_s, now_wall_ns - (now_ns - write.end_ns), step)
            for step, write in writes
        ]

    def close(self) -> None:
        """Nothing is held."""


def mean_readings(steps: Sequence[StepRecord]) -> list[Reading]:
    """Means over steps of what is known of them; pure."""
    found = []
    waits = [seconds for step in steps if (seconds := step.phases.get(Phase.DATA_WAIT)) is not None]
    if waits:
        found.append(Reading("data_wait", sum(waits) / len(waits)))
    told = [(step.communication, step.duration_s) for step in steps if step.communication is not None]
    duration_s = sum(seconds for _, seconds in told)
    if duration_s > 0:
        found += [
            Reading("communication_share", sum(traffic.total_s for traffic, _ in told) / duration_s),
            Reading("exposed_communication_share", sum(traffic.exposed_s for traffic, _ in told) / duration_s),
        ]
    return found
