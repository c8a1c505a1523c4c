"""Batches of streamed data, for one rank: what a LightningModule gets from ``train_dataloader``.

A loader knows where training is by the batches that it has given, and saves that as its state; what workers have read
ahead does not count. The state is the same on all ranks and fits any number of them.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.utils.data import default_collate

from lightning_dist.config import DataConfig, resolve_options
from lightning_dist.data.cache.cached_chunks import CacheOptions
from lightning_dist.data.decoded import default_limit_bytes
from lightning_dist.data.loading.batches import BatchReader, ReadBatch
from lightning_dist.data.loading.roles import ROLES, share_of
from lightning_dist.data.loading.running import Running
from lightning_dist.data.loading.source import Source
from lightning_dist.data.order.identity import DataIdentity, DataSummary
from lightning_dist.data.order.position import Position, begun, done, from_state, given, is_at_end, to_state
from lightning_dist.data.order.replicas import Replicas, of_launcher
from lightning_dist.data.order.shares import ReplicaShare
from lightning_dist.errors import ConfigError, ForeignDataError, unknown_option
from lightning_dist.events import EventStream

WAIT = "data.wait"
"""Name of a span: from when a batch was asked for until it was given; with its ``samples``, the seconds ``read_s`` that
reading took, and how many batches are ``ready`` after it."""
SKIPPED = "data.skipped"
"""Name of a counter: samples whose place others took, since they could not be read."""

_MOST_OPEN = 256  # chunks; each may take a file descriptor

_STATE_KEY = "lightning_dist.data"
_STATE_VERSION = 1
_MOST_IN_HAND = 16


class ShardedLoader:
    """Batches of one rank.

    Args:
        data: A folder, as a path or URL, a map-style data set, a
            :class:`~lightning_dist.data.loading.source.Source`, or several sources, which are mixed by their weights.
        config: Options, or a mapping of them; those of ``DataConfig`` by default.
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

    dataset: Sized
    """As long as the largest batch that Lightning may try; only there where it looks for one."""

    def __init__(
        self,
        data: Any,
        *,
        config: DataConfig | Mapping[str, Any] | None = None,
        role: str = "train",
        transform: Callable[..., Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        epoch_samples: int | None = None,
    ) -> None:
        if role not in ROLES:
            raise unknown_option("role", role, ROLES)
        self.config = resolve_options("data", config, DataConfig)
        self.role = role
        self._sources = sources_of(data)
        self._transform = transform
        self._collate = collate if collate is not None else default_collate
        self._epoch_samples = epoch_samples
        self._events = EventStream()
        self._replicas: Replicas | None = None
        self._share: ReplicaShare | None = None
        self._identity: DataIdentity | None = None
        self._position = Position()
        self._unread: Mapping[str, Any] | None = None  # a state that was loaded before the data were opened
        self._before: deque[Position] = deque(maxlen=_MOST_IN_HAND)  # of each batch given last, where it begins
        self._in_hand: Callable[[], int] = _none
        self._told_epoch = 0
        self._is_loaded = False
        self._num_given = 0
        self._iteration: object = None
        self._running: Running | None = None
        cache = self.config.cache_dir
        for source in self._sources:
            source.decoded_limit_bytes = self._decoded_limit_bytes()
            source.cache = CacheOptions(
                folder=None if cache is None else Path(cache).expanduser(),
                limit_bytes=self.config.cache_limit_bytes,
                ahead_bytes=self.config.fetch_ahead_bytes,
                threads=self.config.fetch_threads,
                wait_s=self.config.timeout_s,
            )

    # -- who reads what -----------------------------------------------------------------------------------------------

    @property
    def sources(self) -> tuple[Source, ...]:
        """What it reads, for questions: their numbers of samples and bytes."""
        return tuple(self._sources)

    @property
    def batch_size(self) -> int:
        """Samples a batch of this rank has, but for the last."""
        return self.config.batch_size

    @property
    def largest_batch(self) -> int:
        """Samples that a batch can have, since this rank takes so many of an epoch."""
        share = self.share
        return share.order.num_samples // len(share.dealing.host_of_replica)

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
        share = share_of(self._sources, self.config, self.role, replicas, epoch_samples=self._epoch_samples)
        lanes = share.order.lanes // math.gcd(share.order.lanes, replicas.count)
        for source in self._sources:
            source.keep_open = self._chunks_at_once(source, lanes)
        return share

    def _decoded_limit_bytes(self) -> int:
        """What a source may hold in each process that reads."""
        config, limit = self.config, self.config.decoded_limit_bytes
        processes = config.workers if config.readers == "processes" else 1
        whole = limit if limit is not None else default_limit_bytes()
        return whole // (max(1, processes) * len(self._sources))

    def _chunks_at_once(self, source: Source, lanes: int) -> int:
        """How many of a source's chunks are read by turns: in each of its lanes, those of a block."""
        index = source.index
        block = self.config.shuffle_block if self.config.shuffle and self.role == "train" else 1
        reached = -(-block * index.num_chunks // max(1, index.num_samples)) + 1
        return max(2, min(lanes * reached, _MOST_OPEN // len(self._sources)))

    # -- where training is --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where training is: after the last batch that was trained on."""
        if self._unread is not None:
            return dict(self._unread)
        return {_STATE_KEY: _STATE_VERSION, **to_state(self.trained, self._identify())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there with the next batch.

        Raises:
            ForeignDataError: The state is another loader's. That the data have changed is found when they are opened.
        """
        if state.get(_STATE_KEY) != _STATE_VERSION:
            raise ForeignDataError(
                f"this is the state of another loader, or of another version of this one: it has {sorted(state)[:8]}"
            )
        self.close()
        self._unread, self._is_loaded, self._iteration = state, True, None
        self._before.clear()

    @property
    def position(self) -> Position:
        """Epoch and samples that were given, of all ranks together.

        Raises:
            ChangedDataError: The data or their order are not those that a loaded state was saved with.
        """
        if self._unread is not None:
            self._position = from_state(self._unread, self._identify(), [source.index for source in self._sources])
            self._unread = None
        return self._position

    @property
    def is_new(self) -> bool:
        """Whether it has loaded no state, and given no batch but those that were taken back."""
        return not self._is_loaded and not self._num_given

    @property
    def trained(self) -> Position:
        """The position without the batches that whoever took them has not trained on."""
        position, in_hand = self.position, self._in_hand()
        return self._before[-in_hand] if 0 < in_hand <= len(self._before) else position

    @property
    def done(self) -> int:
        """Batches of the present epoch that were trained on, counted as if all had the present size."""
        return done(self.trained, self.share.steps)

    def hold_back(self, in_hand: Callable[[], int]) -> None:
        """Say how many of the batches given last were not trained on, whenever the state is asked for."""
        self._in_hand = in_hand

    def take_back(self) -> None:
        """Give the batches that were not trained on once more."""
        in_hand = self._in_hand()
        self.close()
        if 0 < in_hand <= len(self._before):
            self._num_given -= in_hand
        self._position, self._iteration = self.trained, None
        self._before.clear()

    def skip_rest(self) -> None:
        """The present epoch is over, whatever is left of it; the next batch is of the next one."""
        self._position = replace(self.position, is_started=True)

    @property
    def batch_sampler(self) -> Any:
        """Has this loader as its ``sampler``: Lightning tells that in which epoch training is."""
        return SimpleNamespace(sampler=self)  # not `self.sampler`, which Lightning would replace with another

    def set_epoch(self, epoch: int) -> None:
        """Training is in this epoch; a loader that has given no batch and loaded no state begins there."""
        self._told_epoch = epoch

    def _identify(self) -> DataIdentity:
        if self._identity is None:
            sources = tuple(DataSummary.of(source.index) for source in self._sources)
            self._identity = DataIdentity(self.share.order.describe(), sources)
        return self._identity

    # -- batches ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of an epoch; those that were done before it was resumed included."""
        return self.share.steps.length

    def __iter__(self) -> Iterator[Any]:
        """Batches from where training is to the end of the epoch, or of the next one if some were given of this one.

        Nothing is read, and no place taken, before the first batch is asked for. What Lightning has taken ahead when it
        iterates anew, it drops: that comes again.
        """
        if self._in_hand():
            self.take_back()
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        running: Running | None = None
        iteration, is_over = object(), False
        try:
            steps, before = self.share.steps, self.position
            self._position, self._iteration = self._begun(), iteration
            running = self._take_up()
            if self.is_new:
                before = self._position
            while not is_at_end(self._position, steps):
                yield self._next(running, before)
                before = self._position
                if self._iteration is not iteration:
                    raise ConfigError(
                        "this loader is iterated over once more, or was given a state, before the end of its epoch: "
                        "make a loader for each iteration that goes on at the same time"
                    )
            is_over = True
        finally:
            if running is not None and self._running is running and not (is_over and self.config.persistent):
                self.close()

    def _next(self, running: Running, before: Position) -> Any:
        """The next batch. Nothing here refers to it any more once it is given.

        Args:
            running: Who reads it.
            before: Where training is if it is not trained on; for the first of an epoch, at the end of the one before.
        """
        asked_ns = self._events.clock_ns()
        read = running.next()
        self._before.append(before)
        self._position = given(self._position, self.share.steps)
        self._num_given += 1
        self._note(read, asked_ns, running)
        return read.batch

    def _begun(self) -> Position:
        steps = self.share.steps
        if self.is_new and self._told_epoch and self.role == "train":
            return Position(steps.start_of(self._told_epoch))
        return begun(self.position, steps)

    def _take_up(self) -> Running:
        """Workers that read from the present position on; those there are, if that is where they are."""
        running = self._running
        if running is None or not running.is_at(self._position):
            self.close()
            running = self._running = self._start()
        return running

    def _start(self) -> Running:
        config = self.config
        runs_users_code = (
            self._transform is not None
            or self._collate is not default_collate
            or any(source.is_mapped for source in self._sources)
        )
        reader = BatchReader(
            self._sources,
            transform=self._transform,
            collate=self._collate,
            seed=config.seed,
            replica=self.share.replica,
            skips=config.on_unreadable == "skip",
            seeds=runs_users_code and (config.readers == "processes" or not config.workers),
        )
        return Running(self.share, self._position, reader, self._sources, config)

    def _note(self, read: ReadBatch, asked_ns: int, running: Running) -> None:
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


def _none() -> int:
    return 0


def sources_of(data: Any) -> list[Source]:
    """The sources of what a user gives to a loader; its own, since it opens and closes them.

    Raises:
        ConfigError: There are none, or it does not follow what is meant.
        ForeignDataError: It is neither a name nor a data set with a length.
    """
    is_list = isinstance(data, list | tuple)
    if is_list and not data:
        raise ConfigError("no data: give a folder, a data set, or a list of at least one Source")
    if isinstance(data, Mapping) and all(isinstance(name, str) for name in data):
        raise ConfigError(
            f"names ({', '.join(data) or 'none'}) are of several loaders, and this is one: give ShardedDataModule the "
            "mapping for val, test or predict, or make a ShardedLoader of each"
        )
    if is_list and data and all(isinstance(each, str | os.PathLike) for each in data):
        raise ConfigError(
            f"a list of names may be of folders or samples: write [Source({os.fspath(data[0])!r}), ...] for folders, "
            "and give samples as a data set"
        )
    several = data if is_list and any(isinstance(each, Source) for each in data) else [data]
    return [copy.copy(each) if isinstance(each, Source) else Source(each) for each in several]
