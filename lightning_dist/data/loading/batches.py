"""One batch of one replica: what it consists of, and how it is read, in whichever thread or process that is.

Note [Random numbers while reading]
    What a transform draws follows from the seed and the sample, not from who reads it when: a transform that takes a
    second argument gets a generator made for its sample, another one each time the sample comes. It is the same with
    any number of ranks. What draws from Python's, numpy's or torch's own generators finds them set by seed, step and
    replica if it runs in a process of its own or in the training process, whose states are put back afterwards. In
    threads these generators are shared: nothing can be promised.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from lightning_dist.data.index.dataset_index import Numbers
from lightning_dist.errors import UnreadableShardError

Transform = Callable[..., Any]
Collate = Callable[[list[Any]], Any]


class BatchPlan(NamedTuple):
    """What a batch of one replica consists of.

    Attributes:
        start: Number of its step's first sample, whoever takes it; see Note [Numbers of samples] in sample_order.
        numbers: (batch,) of its samples.
        sources: (batch,) which source each sample is from.
        chunks: (batch,) chunk in that source.
        samples: (batch,) sample in that chunk.
    """

    start: int
    numbers: Numbers
    sources: Numbers
    chunks: Numbers
    samples: Numbers


class ReadBatch(NamedTuple):
    """A batch, and what it took.

    Attributes:
        batch: What the model gets.
        size: Samples in it.
        read_s: Seconds to read, decode and collate.
        skipped: Samples whose place others took, since they could not be read.
        counts: What reading counted in this process since the last batch, by name.
    """

    batch: Any
    size: int
    read_s: float
    skipped: int
    counts: Mapping[str, float]


class SampleSource(Protocol):
    """What samples are read from."""

    def read(self, chunk: int, sample: int) -> Any:
        """One sample.

        Raises:
            UnreadableShardError: Its chunk cannot be read.
        """

    def stand_ins(self, chunk: int, sample: int) -> Iterable[tuple[int, int]]:
        """Chunk and sample of a few that may take the place of one that cannot be read; always the same ones."""

    def taken_counts(self) -> Mapping[str, float]:
        """What was counted in this process since the last call, by name."""


@dataclass
class BatchReader:
    """Reads batches. May be sent to other processes, and be called by several threads.

    Attributes:
        sources: What to read from.
        transform: Of a sample, or of a sample and a numpy generator; see Note [Random numbers while reading].
        collate: Of a list of samples.
        seed: Of random numbers.
        replica: Which one reads.
        skips: Whether others take the place of samples that cannot be read; else that is an error.
        seeds: Whether to set the random generators of Python, numpy and torch for each batch; only where no other
            thread of the process reads or draws meanwhile.
    """

    sources: Sequence[SampleSource]
    transform: Transform | None
    collate: Collate
    seed: int
    replica: int
    skips: bool
    seeds: bool

    def __post_init__(self) -> None:
        self._draws = self.transform is not None and _takes_generator(self.transform)

    def __call__(self, plan: BatchPlan) -> ReadBatch:
        """Read a batch."""
        start_ns = time.perf_counter_ns()
        with self._random_state(plan):
            found, skipped = self._samples(plan)
            batch = self.collate(found)
        counts: dict[str, float] = {}
        for source in self.sources:
            for name, value in source.taken_counts().items():
                counts[name] = counts.get(name, 0) + value
        return ReadBatch(batch, len(found), (time.perf_counter_ns() - start_ns) / 1e9, skipped, counts)

    def _samples(self, plan: BatchPlan) -> tuple[list[Any], int]:
        found: list[Any] = []
        failed: list[int] = []
        places = zip(*(column.tolist() for column in plan[1:]), strict=True)
        for position, (number, source, chunk, sample) in enumerate(places):
            try:
                value = self.sources[source].read(chunk, sample)
            except UnreadableShardError as error:
                if not self.skips:
                    raise
                failed.append(position)
                failure = error
                found.append(None)
                continue
            if self.transform is not None:
                value = self._transformed(value, number)
            found.append(value)
        if failed:
            self._replace(found, failed, plan, failure)
        return found, len(failed)

    def _replace(self, found: list[Any], failed: list[int], plan: BatchPlan, failure: UnreadableShardError) -> None:
        """Give the places of samples that could not be read to others of the batch, in turn.

        Where there are none, to samples of other chunks. Either follows from the batch alone, so that a run that is
        resumed takes the same.
        """
        readable = [value for position, value in enumerate(found) if position not in set(failed)]
        for turn, position in enumerate(failed):
            found[position] = readable[turn % len(readable)] if readable else self._stand_in(plan, position, failure)

    def _stand_in(self, plan: BatchPlan, position: int, failure: UnreadableShardError) -> Any:
        number, source, chunk, sample = (int(column[position]) for column in plan[1:])
        for place in self.sources[source].stand_ins(chunk, sample):
            try:
                value = self.sources[source].read(*place)
            except UnreadableShardError:
                continue
            return value if self.transform is None else self._transformed(value, number)
        raise failure

    def _transformed(self, value: Any, number: int) -> Any:
        assert self.transform is not None
        if not self._draws:
            return self.transform(value)
        return self.transform(value, np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, number)))))

    @contextlib.contextmanager
    def _random_state(self, plan: BatchPlan) -> Iterator[None]:
        if not self.seeds:
            yield
            return
        kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
        key = np.random.SeedSequence((self.seed, plan.start, self.replica)).generate_state(2, np.uint64)
        random.seed(int(key[0]))
        np.random.seed(int(key[1]) % 2**32)
        torch.default_generator.manual_seed(int(key[0]) % 2**63)  # not that of devices
        try:
            yield
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])
            torch.set_rng_state(kept[2])


def _takes_generator(transform: Transform) -> bool:
    """Whether a second positional argument has no default."""
    try:
        parameters = list(inspect.signature(transform).parameters.values())
    except (TypeError, ValueError):  # of a function in C
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [each for each in parameters if each.kind in kinds and each.default is inspect.Parameter.empty]
    return len(required) >= 2
