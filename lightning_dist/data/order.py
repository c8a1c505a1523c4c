"""The order of an epoch: which sample of which chunk stands at a position. Pure.

Chunks are permuted by seed and epoch and laid in a line. The line is cut into lanes, which take turns: position p is in
lane p mod L, and within a lane blocks of neighbours are permuted. Nothing depends on ranks, and nothing grows with the
number of samples: an epoch takes a list of its chunks, a position some arithmetic.

Note [Numbers of samples]
Epochs follow each other without end. Position p of epoch e has the *number* e N + p, N being the samples of an epoch.
A lane is a class of numbers mod L. In an epoch such a class is one lane of that epoch, which one changes with the
epoch unless L divides N. So whoever takes a class of numbers reads one lane at a time.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from lightning_dist.config.checks import check_count, check_flags
from lightning_dist.data import shuffling
from lightning_dist.data.index import Numbers

ALGORITHM = 1
"""Counted up with any change of the orders that this library makes: positions in others have no meaning in it."""
EPOCHS_KEPT = 4
"""Lists of chunks that are kept: of the present epoch, the one before, and those that batches run over into."""


@dataclass(frozen=True, kw_only=True)
class OrderOptions:
    """What the order depends on besides the data.

    Attributes:
        seed: Of all permutations.
        lanes: Places of the data that are read in turn. 24 is divided by 1, 2, 3, 4, 6, 8, 12 and 24 hosts or replicas.
        shuffle_block: Neighbours in a lane that are permuted among each other, in samples. A lane reads this much at a
            time, so it is best no larger than a chunk.
        shuffle: ``False`` leaves chunks and samples in the order of their files. They are still dealt to lanes; with
            one lane, position p is sample p of the files.
    """

    seed: int
    lanes: int = 24
    shuffle_block: int = 4096
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_count("seed", self.seed, low=0, unit="(no unit)")
        check_count("lanes", self.lanes, low=1, high=65536, unit="lanes")
        check_count("shuffle_block", self.shuffle_block, low=1, unit="samples")
        check_flags("order", self)


FILE_ORDER = OrderOptions(seed=0, lanes=1, shuffle=False)
"""Sample after sample as they lie in the files: what evaluation and prediction want, whose results are laid beside the
data. With as many lanes as hosts, or a multiple, each host would read its part of the files only."""


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
    """The line of an epoch.

    Attributes:
        sequence: (chunks,) numbers of the chunks in their order.
        ends: (chunks,) where each one ends in the line.
        base: Key of its blocks.
    """

    sequence: Numbers
    ends: Numbers
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
        lane = np.arange(self.lanes, dtype=np.int64)
        self._lane_sizes = self.num_samples // self.lanes + (lane < self.num_samples % self.lanes)
        by_section = np.argsort(sections(self.lanes))
        ends = np.cumsum(self._lane_sizes[by_section])
        self._lane_starts = np.empty(self.lanes, dtype=np.int64)
        self._lane_starts[by_section] = ends - self._lane_sizes[by_section]
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
        of_chunks, of_blocks = (shuffling.key(self.options.seed, self._source, epoch, what) for what in (0, 1))
        size = len(self._samples)
        sequence = shuffling.permutation(size, of_chunks) if self.options.shuffle else np.arange(size, dtype=np.int64)
        return _Laid(sequence, np.cumsum(self._samples[sequence]), of_blocks)

    def _in_epoch(self, epoch: int, positions: Numbers) -> tuple[Numbers, Numbers]:
        laid = self._laid(epoch)
        offsets, lanes = np.divmod(positions, self.lanes)
        if self.options.shuffle:
            offsets = self._in_blocks(laid.base, lanes, offsets)
        line = self._lane_starts[lanes] + offsets
        places = np.searchsorted(laid.ends, line, side="right")  # right: past chunks without samples
        chunks = laid.sequence[places]
        return chunks, line - laid.ends[places] + self._samples[chunks]

    def _in_blocks(self, base: int, lanes: Numbers, offsets: Numbers) -> Numbers:
        blocks = offsets // self.options.shuffle_block
        starts = blocks * self.options.shuffle_block
        sizes = np.minimum(self._lane_sizes[lanes] - starts, self.options.shuffle_block)
        words = shuffling.keys(base, blocks * self.lanes + lanes)
        return starts + shuffling.permuted(offsets - starts, sizes, words)


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
