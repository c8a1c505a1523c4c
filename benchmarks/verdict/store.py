"""Samples in a file that is really read, from a store that takes its time."""

from __future__ import annotations

import itertools
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from benchmarks.verdict.runs import WORLD_SIZE, Reads, Run

_SAMPLES = 256  # in the file; data sets go through it again and again


def write_samples(path: Path, sample_bytes: int) -> None:
    """Make the file that :class:`Store` reads."""
    values = np.random.default_rng(0).standard_normal(_SAMPLES * sample_bytes // 4, dtype=np.float32)
    path.write_bytes(values.tobytes())


class Store:
    """Reads samples; each takes as long as its bytes need, give or take some noise.

    Args:
        path: Of the file.
        run: Says what the store takes.
        rank: Noise differs from rank to rank.
    """

    def __init__(self, path: Path, run: Run, *, rank: int) -> None:
        self._path = path
        self._size = run.sample_bytes
        self._s_per_byte = run.read_s_per_byte
        self._jitter = run.read_jitter
        self._random = random.Random(f"{run.seed} store {rank}")

    def read(self, indices: Sequence[int]) -> list[Tensor]:
        """Some samples, at once."""
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            raw = [os.pread(descriptor, self._size, index % _SAMPLES * self._size) for index in indices]
        finally:
            os.close(descriptor)
        if self._s_per_byte:
            time.sleep(len(raw) * self._size * self._s_per_byte * noise(self._random, self._jitter))
        return [torch.frombuffer(bytearray(each), dtype=torch.float32) for each in raw]


def noise(random_: random.Random, deviation: float) -> float:
    """A positive factor, one on average, of about the given relative standard deviation."""
    return math.exp(random_.gauss(-deviation * deviation / 2, deviation))


class Samples(Dataset[Tensor]):
    """All samples of an epoch; a sampler says which of them a rank reads."""

    def __init__(self, store: Store, length: int) -> None:
        self._store = store
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tensor:
        return self._store.read([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return self._store.read(indices)


class Unsharded(IterableDataset[Tensor]):
    """A stream that nobody has dealt to ranks: each reads all of it, and keeps its part."""

    def __init__(self, store: Store, *, rank: int, batch_size: int, batches: int) -> None:
        self._store = store
        self._rank = rank
        self._batch_size = batch_size
        self._batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        together = self._batch_size * WORLD_SIZE
        for batch in range(self._batches):
            samples = self._store.read(range(batch * together, (batch + 1) * together))
            yield from itertools.islice(samples, self._rank, None, WORLD_SIZE)


def make_loader(run: Run, path: Path, *, rank: int) -> DataLoader[Tensor]:
    """What a user gives to ``fit``; Lightning adds its sampler unless :func:`takes_sampler` says no."""
    store = Store(path, run, rank=rank)
    if run.reads is Reads.ALL:
        stream = Unsharded(store, rank=rank, batch_size=run.batch_size, batches=run.steps)
        return DataLoader(stream, batch_size=run.batch_size)
    readers = 1 if run.reads is Reads.SAME or run.strategy == "pipeline" else WORLD_SIZE
    return DataLoader(Samples(store, run.steps * run.batch_size * readers), batch_size=run.batch_size)


def takes_sampler(run: Run) -> bool:
    """Whether Lightning may deal samples to ranks."""
    return run.reads is Reads.OWN
