"""Batches of streamed data, for one rank: what a LightningModule gets from ``train_dataloader``.

A loader knows where training is by the batches that it has given, and saves that as its state; what workers have read
ahead does not count. The state is the same on all ranks and fits any number of them.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import default_collate

from lightning_dist.config import DataConfig
from lightning_dist.data.ahead import ChunkKey, looked_ahead
from lightning_dist.data.batches import BatchPlan, BatchReader, ReadBatch
from lightning_dist.data.cache import CacheOptions
from lightning_dist.data.dealing import Dealing
from lightning_dist.data.identity import DataIdentity, DataSummary
from lightning_dist.data.mixture import Mixture
from lightning_dist.data.nodes import Reading
from lightning_dist.data.order import Order, OrderOptions, SampleOrder
from lightning_dist.data.position import Position, begun, from_state, given, is_at_end, to_state
from lightning_dist.data.replicas import Replicas, of_launcher
from lightning_dist.data.shares import ReplicaShare
from lightning_dist.data.source import Source
from lightning_dist.data.steps import EndlessSteps, ExactSteps, Steps
from lightning_dist.errors import ConfigError, ForeignDataError, unknown_option
from lightning_dist.events import EventStream

ROLES = ("train", "evaluate", "predict")

WAIT = "data.wait"
"""Name of a span: from when a batch was asked for until it was given; with its ``samples``, the seconds ``read_s`` that
reading took, and how many batches are ``ready`` after it."""
SKIPPED = "data.skipped"
"""Name of a counter: samples whose place others took, since they could not be read."""

_STEPS_AT_ONCE = 64  # whose samples are found at once: that takes little longer than for one
_MOST_OPEN = 256  # chunks; each may take a file descriptor

_STATE_KEY = "lightning_dist.data"
_STATE_VERSION = 1


class ShardedLoader:
    """Batches of one rank.

    Args:
        data: A folder, as a path or URL, a map-style data set, a :class:`~lightning_dist.data.source.Source`, or
            several sources, which are mixed by their weights.
        config: Options; those of ``DataConfig`` by default.
        role: ``train``, ``evaluate`` (in no random order, each sample once, on all ranks equally many batches) or
            ``predict`` (the same, in the order of the files).
        transform: Of a sample, or of a sample and a numpy generator that is made for it. It may be sent to other
            processes.
        collate: Makes a batch of a list of samples; torch's ``default_collate`` by default.
        epoch_samples: Samples of an epoch of a mixture; by default as many as its sources have.

    Raises:
        ConfigError: An option does not fit the data.
        ForeignDataError: The data are in no format that is read.
    """

    def __init__(
        self,
        data: Any,
        *,
        config: DataConfig | None = None,
        role: str = "train",
        transform: Callable[..., Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        epoch_samples: int | None = None,
    ) -> None:
        if role not in ROLES:
            raise unknown_option("role", role, ROLES)
        self.config = config if config is not None else DataConfig()
        self.role = role
        self._sources = _sources_of(data)
        self._transform = transform
        self._collate = collate if collate is not None else default_collate
        self._epoch_samples = epoch_samples
        self._events = EventStream()
        self._replicas: Replicas | None = None
        self._share: ReplicaShare | None = None
        self._identity: DataIdentity | None = None
        self._position = Position()
        self._unread: Mapping[str, Any] | None = None  # a state that was loaded before the data were opened
        self._running: _Running | None = None
        cache = self.config.cache_dir
        for source in self._sources:
            source.cache = CacheOptions(
                folder=None if cache is None else Path(cache).expanduser(),
                limit_bytes=self.config.cache_limit_bytes,
                ahead_bytes=self.config.fetch_ahead_bytes,
                threads=self.config.fetch_threads,
                wait_s=self.config.timeout_s,
            )

    # -- who reads what -----------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Samples a batch of this rank has, but for the last."""
        return self.config.batch_size

    def place(self, replicas: Replicas, events: EventStream | None = None) -> None:
        """Say who reads; without it, each rank of the launcher is a replica.

        Args:
            replicas: The same on all ranks, but for the own one.
            events: Where waiting and reading are recorded.
        """
        self._events = events if events is not None else self._events
        if replicas != self._replicas:
            self.close()
            self._replicas, self._share = replicas, None

    @property
    def share(self) -> ReplicaShare:
        """What this rank takes of the data."""
        if self._share is None:
            self._share = self._make_share()
        return self._share

    def _make_share(self) -> ReplicaShare:
        replicas = self._replicas
        if replicas is None:
            is_run = dist.is_available() and dist.is_initialized()
            replicas = of_launcher(dist.get_world_size() if is_run else 1, dist.get_rank() if is_run else 0, os.environ)
        order = self._make_order()
        lanes = order.lanes // math.gcd(order.lanes, replicas.count)
        for source in self._sources:
            source.keep_open = self._chunks_at_once(source, lanes)
        dealing = Dealing(replicas.host_of, order.lanes)
        return ReplicaShare(order, self._make_steps(order, replicas.count), dealing, replicas.own)

    def _chunks_at_once(self, source: Source, lanes: int) -> int:
        """How many of a source's chunks are read by turns: in each of its lanes, those that a block reaches into."""
        index = source.index
        block = self.config.shuffle_block if self.config.shuffle and self.role == "train" else 1
        reached = -(-block * index.num_chunks // max(1, index.num_samples)) + 1
        return max(2, min(lanes * reached, _MOST_OPEN // len(self._sources)))

    def _make_order(self) -> SampleOrder:
        config, role = self.config, self.role
        options = OrderOptions(
            seed=config.seed,
            lanes=1 if role == "predict" else config.lanes,
            shuffle_block=config.shuffle_block,
            shuffle=config.shuffle and role == "train",
        )
        orders = [Order(source.index.samples, options, source=number) for number, source in enumerate(self._sources)]
        if len(orders) == 1 and self._epoch_samples is None:
            return orders[0]
        return Mixture(orders, [source.weight for source in self._sources], epoch_samples=self._epoch_samples)

    def _make_steps(self, order: SampleOrder, num_replicas: int) -> Steps:
        total = self.config.batch_size * num_replicas
        trains = self.role == "train"
        if trains and self.config.epoch == "endless":
            return EndlessSteps(num_samples=order.num_samples, num_replicas=num_replicas, batch_size=total)
        return ExactSteps(
            num_samples=order.num_samples,
            num_replicas=num_replicas,
            batch_size=total,
            last_batch=self.config.last_batch if trains else "short",
        )

    # -- where training is --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where training is: after the last batch that was given."""
        if self._unread is not None:
            return dict(self._unread)
        return {_STATE_KEY: _STATE_VERSION, **to_state(self._position, self._identify())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there with the next ``iter()``.

        Raises:
            ChangedDataError: The data or their order are not those that the state was saved with.
            ForeignDataError: The state is another loader's.
        """
        if state.get(_STATE_KEY) != _STATE_VERSION:
            raise ForeignDataError(
                f"this is the state of another loader, or of another version of this one: it has {sorted(state)[:8]}"
            )
        self.close()
        self._unread = state

    @property
    def position(self) -> Position:
        """Epoch and samples that were given, of all ranks together."""
        if self._unread is not None:
            state, self._unread = self._unread, None
            self._position = from_state(state, self._identify(), [source.index for source in self._sources])
        return self._position

    def _identify(self) -> DataIdentity:
        if self._identity is None:
            sources = tuple(DataSummary.of(source.index) for source in self._sources)
            self._identity = DataIdentity(self.share.order.describe(), sources)
        return self._identity

    # -- batches ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of the present epoch, those that were given before it was resumed included."""
        position = self.position
        return self.share.steps.length(position.place.consumed, position.done)

    def __iter__(self) -> Iterator[Any]:
        self._position = begun(self.position, self.share.steps)
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        """Batches from the present position to the end of the pass."""
        running, is_over = self._take_up(), False
        try:
            while not is_at_end(self._position, self.share.steps):
                asked_ns = self._events.clock_ns()
                read = running.next()
                self._position = given(self._position, self.share.steps)
                self._note(read, asked_ns, running)
                yield read.batch
            is_over = True
        finally:
            if self._running is running and not (is_over and self.config.persistent):
                self.close()

    def _take_up(self) -> _Running:
        """Workers that read from the present position on; those there are, if that is where they are."""
        running = self._running
        if running is None or not running.is_at(self._position):
            self.close()
            running = self._running = self._start()
        return running

    def _start(self) -> _Running:
        config = self.config
        processes = config.workers > 0 and config.readers == "processes"
        reader = BatchReader(
            self._sources,
            transform=self._transform,
            collate=self._collate,
            seed=config.seed,
            replica=self.share.replica,
            skips=config.on_unreadable == "skip",
            is_alone=processes or not config.workers,
        )
        plans = looked_ahead(
            _plans(self.share, self._position, is_endless=config.persistent),
            size_of=partial(_size_of, self._sources),
            ahead_bytes=config.fetch_ahead_bytes,
            expect=partial(_expect, self._sources),
        )
        return _Running(self.share.steps, self._position, plans, reader, config)

    def _note(self, read: ReadBatch, asked_ns: int, running: _Running) -> None:
        events = self._events
        ready: dict[str, Any] = {} if running.ready is None else {"ready": running.ready}
        events.span(WAIT, asked_ns, samples=read.size, read_s=read.read_s, **ready)
        if read.skipped:
            events.count(SKIPPED, read.skipped)
        for counts in (read.counts, *(source.taken_counts() for source in self._sources)):
            for name, value in counts.items():
                events.count(name, value)

    def close(self) -> None:
        """End the workers, and what is open. Safe to call twice; the next batch opens it again."""
        running, self._running = self._running, None
        if running is not None:
            running.close()
        for source in self._sources:
            source.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the interpreter, what it needs may be gone
            self.close()


class _Running:
    """Workers that read the batches from a position on.

    Attributes:
        position: Of the batch that comes next.
    """

    def __init__(
        self, steps: Steps, position: Position, plans: Iterator[BatchPlan], reader: BatchReader, config: DataConfig
    ) -> None:
        self.position = replace(position, is_started=False)
        self._steps = steps
        self._finished = 0
        self._given = 0
        self._lock = threading.Lock()
        self._reader = reader
        self._counts_ready = not (config.workers and config.readers == "processes")
        self._reading: Reading[ReadBatch] = Reading(
            plans,
            self._read if self._counts_ready else reader,
            workers=config.workers,
            processes=config.readers == "processes",
            prefetch=config.prefetch,
            pin_memory=config.pin_memory,
            timeout_s=config.timeout_s,
        )

    def is_at(self, position: Position) -> bool:
        """Whether the batch of a position comes next, also if that is the first of the next pass."""
        here = begun(self.position, self._steps) if is_at_end(self.position, self._steps) else self.position
        return (here.place, here.done) == (position.place, position.done)

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
        """End them."""
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
            run = []
            while len(run) < _STEPS_AT_ONCE and not is_at_end(position, share.steps):
                run.append(position)
                position = given(position, share.steps)
            for each, located in zip(run, share.each([each.place for each in run]), strict=True):
                yield BatchPlan(each.done, each.place.epoch, *located)
        if not is_endless:
            return
        position = begun(position, share.steps)


# Not methods: workers that refer to the loader would keep it from being collected, and so go on for ever.
def _size_of(sources: Sequence[Source], key: ChunkKey) -> int:
    source, chunk = key
    return int(sources[source].index.sizes[chunk])


def _expect(sources: Sequence[Source], keys: list[ChunkKey]) -> None:
    for number, source in enumerate(sources):
        source.expect([chunk for key, chunk in keys if key == number])


def _sources_of(data: Any) -> list[Source]:
    """The sources of what a user gives."""
    several = data if isinstance(data, list | tuple) and any(isinstance(each, Source) for each in data) else [data]
    sources = [each if isinstance(each, Source) else Source(each) for each in several]
    if not sources:
        raise ConfigError("no data were given")
    return sources
