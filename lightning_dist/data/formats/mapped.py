"""A map-style data set, in the order of this library. Nothing is fetched: chunks are ranges of indices."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lightning_dist.data.decoded import Decoded
from lightning_dist.data.index.dataset_index import Chunk, DatasetIndex
from lightning_dist.data.reading import Place, ReadFolder
from lightning_dist.errors import ForeignDataError


class MapStyle(Protocol):
    """What ``torch.utils.data.Dataset`` is if it has a length."""

    def __len__(self) -> int:
        """Samples in it."""

    def __getitem__(self, index: int, /) -> Any:
        """One of them."""


def check_mapped(dataset: Any) -> None:
    """Refuse what is no map-style data set, by its methods; that its length is unknown may show later.

    Raises:
        ForeignDataError: It is none.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise _without_length(dataset)


def _without_length(dataset: Any) -> ForeignDataError:
    return ForeignDataError(
        f"{type(dataset).__name__} has no length, so its samples have no order of their own: "
        "give a data set with __len__ and __getitem__"
    )


@dataclass(frozen=True)
class MappedFormat:
    """A map-style data set.

    Args:
        dataset: Any object with ``__len__`` and ``__getitem__``.
        chunk_samples: Samples that count as lying side by side.
    """

    name = "mapped"

    dataset: MapStyle
    chunk_samples: int = 1024

    def index(self, folder: ReadFolder | None = None) -> DatasetIndex:
        """See :class:`~lightning_dist.data.reading.Format`; there is no folder.

        Raises:
            ForeignDataError: The data set has no length.
        """
        try:
            size = len(self.dataset)
        except (TypeError, NotImplementedError) as error:
            raise _without_length(self.dataset) from error
        starts = np.arange(0, size, self.chunk_samples, dtype=np.int64)
        return DatasetIndex(
            format=self.name,
            shards=("samples",),
            shard_of=np.zeros_like(starts),
            starts=starts,
            sizes=np.zeros_like(starts),
            samples=np.minimum(self.chunk_samples, size - starts),
            properties={"type": type(self.dataset).__name__},
        )

    def open(self, place: Place, chunk: Chunk, properties: Mapping[str, Any], decoded: Decoded) -> OpenRange:
        """See :class:`~lightning_dist.data.reading.Format`; the place does not matter."""
        return OpenRange(self.dataset, chunk)


class OpenRange:
    """A range of indices.

    Args:
        dataset: The user's.
        chunk: Its start is the first index.
    """

    def __init__(self, dataset: MapStyle, chunk: Chunk) -> None:
        self._dataset = dataset
        self._first = chunk.start
        self._num_samples = chunk.num_samples

    def sample(self, index: int) -> Any:
        """What the data set gives; whether it shares memory is the data set's business."""
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        return self._dataset[self._first + index]

    def close(self) -> None:
        """See :class:`~lightning_dist.data.reading.OpenChunk`; the data set stays as it is."""


class NothingToFetch:
    """The :class:`~lightning_dist.data.reading.Chunks` of a map-style data set."""

    def place(self, chunk: Chunk) -> Place:
        """Nowhere."""
        return Place(Path(os.devnull), 0, 0)

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """Nothing is done."""

    def close(self) -> None:
        """Nothing is done."""
