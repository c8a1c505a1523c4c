"""The readers of one loader at work: from a position on, batch after batch, in the order of the steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from lightning_dist.config import DataConfig
from lightning_dist.data.loading.ahead import ChunkKey, looked_ahead
from lightning_dist.data.loading.batches import BatchPlan, BatchReader, ReadBatch
from lightning_dist.data.loading.nodes import Reading
from lightning_dist.data.loading.source import Source
from lightning_dist.data.order.position import Position, begun, given, is_at_end
from lightning_dist.data.order.shares import ReplicaShare
from lightning_dist.data.order.steps import Place, Steps

_STEPS_AT_ONCE = 64  # whose samples are found at once: that takes little longer than for one


class Running:
    """Workers that read the batches from a position on.

    Args:
        share: What to read.
        position: Of the first batch.
        reader: How to read it.
        sources: What it is read from.
        config: Options.

    Attributes:
        position: Of the batch that comes next.
    """

    def __init__(
        self,
        share: ReplicaShare,
        position: Position,
        reader: BatchReader,
        sources: Sequence[Source],
        config: DataConfig,
    ) -> None:
        self.position = replace(position, is_started=False)
        self._steps: Steps = share.steps
        self._finished = 0
        self._given = 0
        self._lock = threading.Lock()
        self._reader = reader
        processes = config.readers == "processes"
        self._counts_ready = not (config.workers and processes)
        self._reading: Reading[ReadBatch] = Reading(
            looked_ahead(
                _plans(share, position, is_endless=config.persistent),
                size_of=partial(_size_of, sources),
                ahead_bytes=config.fetch_ahead_bytes,
                expect=partial(_expect, sources),
            ),
            self._read if self._counts_ready else reader,
            workers=config.workers,
            processes=processes,
            prefetch=config.prefetch,
            pin_memory=config.pin_memory,
            timeout_s=config.timeout_s,
        )

    def is_at(self, position: Position) -> bool:
        """Whether the batch of a position comes next, also if that is the first of the next pass."""
        here = begun(self.position, self._steps) if is_at_end(self.position, self._steps) else self.position
        return (here.place, here.taken) == (position.place, position.taken)

    @property
    def ready(self) -> int | None:
        """Batches that are read and were not given yet; ``None`` if other processes have them."""
        return self._finished - self._given if self._counts_ready else None

    def next(self) -> ReadBatch:
        """The next batch."""
        if is_at_end(self.position, self._steps):  # the workers have gone on to the next pass
            self.position = begun(self.position, self._steps)
        read = next(self._reading)
        self._given += 1
        self.position = replace(given(self.position, self._steps), is_started=False)
        return read

    def close(self) -> None:
        """End them. Safe to call twice."""
        self._reading.close()

    def _read(self, plan: BatchPlan) -> ReadBatch:
        read = self._reader(plan)
        with self._lock:
            self._finished += 1
        return read


def _plans(share: ReplicaShare, position: Position, *, is_endless: bool) -> Iterator[BatchPlan]:
    """Of the batches from a position on; to the end of its pass, or beyond."""
    while True:
        while not is_at_end(position, share.steps):
            run: list[Place] = []
            while len(run) < _STEPS_AT_ONCE and not is_at_end(position, share.steps):
                run.append(position.place)
                position = given(position, share.steps)
            for taken in share.each(run):
                yield BatchPlan(taken.start, taken.numbers, *taken.located)
        if not is_endless:
            return
        position = begun(position, share.steps)


# Not methods: workers that refer to a loader would keep it from being collected, and so go on for ever.
def _size_of(sources: Sequence[Source], key: ChunkKey) -> int:
    source, chunk = key
    return int(sources[source].index.sizes[chunk])


def _expect(sources: Sequence[Source], keys: list[ChunkKey]) -> None:
    for number, source in enumerate(sources):
        source.expect([chunk for key, chunk in keys if key == number])
