"""The order of an epoch: which sample of which chunk stands at a position. Pure.

Chunks are permuted by the seed and laid in a line, once. The line is cut into lanes, which take turns. In each epoch a
lane's chunks are permuted anew, and then the samples of each block of it, which is one chunk or a few. So a lane has
the same chunks in all epochs, and who reads it once has them in its cache. Nothing depends on ranks, and nothing grows
with the number of samples: an epoch takes a list of its chunks, a position some arithmetic.

Note [Numbers of samples]
Epochs follow each other without end. Position p of epoch e has the *number* e N + p, N being the samples of an epoch.
A lane is a class of numbers mod L, so whoever takes a class of numbers reads one lane only. Where L does not divide N,
N mod L lanes have one sample more in an epoch, and the next ones in the next epoch: borders of lanes move by less than
L samples.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from lightning_dist.config.checks import check_count, check_flags
from lightning_dist.data.index.dataset_index import Numbers
from lightning_dist.data.order import shuffling

ALGORITHM = 1
"""Counted up with any change of the orders that this library makes: positions in others have no meaning in it."""
_OF_CHUNKS, _OF_PIECES, _OF_BLOCKS = range(3)  # what is permuted
EPOCHS_KEPT = 4
"""Lists of chunks that are kept: of the present epoch, the one before, and those that batches run over into."""


@dataclass(frozen=True, kw_only=True)
class OrderOptions:
    """What the order depends on besides the data.

    Attributes:
        seed: Of all permutations.
        lanes: Places of the data that are read in turn. 24 is divided by 1, 2, 3, 4, 6, 8, 12 and 24 hosts or replicas.
        shuffle_block: Chunks of a lane that together have about so many samples, and one at least, are a block, whose
            samples are permuted among each other. A lane reads one block at a time.
        shuffle: ``False`` leaves chunks and samples in the order of their files. They are still dealt to lanes; with
            one lane, position p is sample p of the files.
    """

    seed: int
    lanes: int = 24
    shuffle_block: int = 1024
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_count("seed", self.seed, low=0, unit="(a seed)")
        check_count("lanes", self.lanes, low=1, high=65536, unit="lanes")
        check_count("shuffle_block", self.shuffle_block, low=1, unit="samples")
        check_flags("order", self)


class Located(NamedTuple):
    """Samples, one a row.

    Attributes:
        sources: (samples,) which data set.
        chunks: (samples,) number of the chunk in it.
        samples: (samples,) which one of the chunk.
    """

    sources: Numbers
    chunks: Numbers
    samples: Numbers


class SampleOrder(Protocol):
    """An order of samples, of one data set or of a mixture.

    Attributes:
        lanes: Classes of numbers that are read apart from each other; see Note [Numbers of samples].
        num_samples: Positions in an epoch.
    """

    lanes: int
    num_samples: int

    def locate(self, epoch: int, positions: Numbers) -> Located:
        """The samples at positions; those below 0 are of the epochs before, those above of the epochs after."""

    def describe(self) -> dict[str, Any]:
        """Plain values that the order depends on, besides the data."""


class _Laid(NamedTuple):
    """The line of an epoch. A piece is what one lane has of one chunk.

    Attributes:
        chunks: (pieces,) chunk of each, in the order of the line.
        ends: (pieces,) where it ends in the line.
        back: (pieces,) what is taken from a place in the line to give the sample of the chunk.
        block_ends: (blocks,) where each block ends in the line.
        lane_starts: (lanes,) where each lane begins in it.
        base: Key of the blocks.
    """

    chunks: Numbers
    ends: Numbers
    back: Numbers
    block_ends: Numbers
    lane_starts: Numbers
    base: int


class Order:
    """The order of one data set.

    Args:
        samples: (chunks,) how many each chunk has; 0 is fine.
        options: What else it depends on.
        source: Number of the data set in a mixture; sources of a mixture are permuted apart.
    """

    def __init__(self, samples: Numbers, options: OrderOptions, *, source: int = 0) -> None:
        self.options = options
        self.lanes = options.lanes
        self.num_samples = int(samples.sum())
        self._samples = np.asarray(samples, dtype=np.int64)
        self._source = source
        chunks = np.arange(len(samples), dtype=np.int64)
        if options.shuffle:
            chunks = shuffling.permutation(len(samples), shuffling.key(options.seed, source, _OF_CHUNKS))
        self._sequence = chunks[self._samples[chunks] > 0]
        self._ends = np.cumsum(self._samples[self._sequence])
        self._laid = functools.lru_cache(maxsize=EPOCHS_KEPT)(self._lay)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Order, source=self._source), (self._samples, self.options)

    def locate(self, epoch: int, positions: Numbers) -> Located:
        """See :meth:`SampleOrder.locate`."""
        return self.locate_numbers(positions + epoch * self.num_samples)

    def locate_numbers(self, numbers: Numbers) -> Located:
        """The samples with these numbers; see Note [Numbers of samples]."""
        if not len(numbers):
            return Located(*np.zeros((3, 0), dtype=np.int64))
        check_numbers(numbers, self.num_samples)
        epochs, positions = np.divmod(numbers, self.num_samples)
        chunks, samples = np.empty_like(positions), np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            rows = epochs == epoch
            chunks[rows], samples[rows] = self._in_epoch(epoch, positions[rows])
        return Located(np.full_like(chunks, self._source), chunks, samples)

    def describe(self) -> dict[str, Any]:
        """See :meth:`SampleOrder.describe`."""
        return {"algorithm": ALGORITHM, **asdict(self.options)}

    def _lay(self, epoch: int) -> _Laid:
        sizes = self.num_samples // self.lanes + (self._turns(epoch) < self.num_samples % self.lanes)
        by_section = np.argsort(sections(self.lanes))
        section_ends = np.cumsum(sizes[by_section])
        starts = np.empty(self.lanes, dtype=np.int64)
        starts[by_section] = section_ends - sizes[by_section]
        ends = np.union1d(self._ends, section_ends[section_ends > 0])
        lengths = np.diff(ends, prepend=0)
        places = np.searchsorted(self._ends, ends)
        chunks = self._sequence[places]
        firsts = ends - lengths - (self._ends - self._samples[self._sequence])[places]
        in_sections = np.searchsorted(section_ends, ends)
        if self.options.shuffle:
            words = shuffling.keys(self._key(epoch, _OF_PIECES), np.arange(len(ends), dtype=np.int64))
            order = np.lexsort((words, in_sections))
            lengths, chunks, firsts = lengths[order], chunks[order], firsts[order]
            ends = np.cumsum(lengths)
        windows = (ends - 1 - (section_ends - sizes[by_section])[in_sections]) // self.options.shuffle_block
        is_last = np.append((np.diff(windows) != 0) | (np.diff(in_sections) != 0), True)[: len(ends)]
        return _Laid(chunks, ends, ends - lengths - firsts, ends[is_last], starts, self._key(epoch, _OF_BLOCKS))

    def _in_epoch(self, epoch: int, positions: Numbers) -> tuple[Numbers, Numbers]:
        laid = self._laid(epoch)
        shift = epoch * self.num_samples % self.lanes
        offsets, lanes = np.divmod(positions + shift, self.lanes)
        line = laid.lane_starts[lanes] + offsets - (lanes < shift)
        if self.options.shuffle:
            line = _in_blocks(laid, line)
        pieces = np.searchsorted(laid.ends, line, side="right")
        return laid.chunks[pieces], line - laid.back[pieces]

    def _turns(self, epoch: int) -> Numbers:
        """(lanes,) which position of the epoch is each lane's first."""
        return (np.arange(self.lanes, dtype=np.int64) - epoch * self.num_samples) % self.lanes

    def _key(self, epoch: int, what: int) -> int:
        return shuffling.key(self.options.seed, self._source, epoch, what)


def _in_blocks(laid: _Laid, line: Numbers) -> Numbers:
    """Where places of the line go, each in its block."""
    blocks = np.searchsorted(laid.block_ends, line, side="right")
    ends = laid.block_ends[blocks]
    starts = np.where(blocks > 0, laid.block_ends[blocks - 1], 0)
    return starts + shuffling.permuted(line - starts, ends - starts, shuffling.keys(laid.base, blocks))


def sections(lanes: int) -> Numbers:
    """(lanes,) which section of the line each lane has: its number with the digits reversed.

    The digits are those of the mixed radix of the prime factors. So the lanes that are alike mod H lie side by side for
    each H that is a product of the first factors: 2, 4, 8 and 24 of 24 lanes.
    """
    numbers = np.arange(lanes, dtype=np.int64)
    found, rest = np.zeros_like(numbers), lanes
    for factor in _prime_factors(lanes):
        rest //= factor
        numbers, digits = np.divmod(numbers, factor)
        found += digits * rest
    return found


def check_numbers(numbers: Numbers, num_samples: int) -> None:
    """Refuse what no order has."""
    if num_samples == 0 or numbers.min() < 0:
        raise ValueError(f"an order of {num_samples} samples has no sample number {numbers.min()}")


def _prime_factors(number: int) -> list[int]:
    factors, factor = [], 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor = factor + 1 if factor * factor <= number else number
    return factors
