"""A map-style data set in chunks of indices."""

import pytest

from lightning_dist.data.decoded import Decoded
from lightning_dist.data.formats.mapped import MappedFormat, NothingToFetch
from lightning_dist.errors import ForeignDataError


class Squares:
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self._size
        return index**2


@pytest.mark.parametrize("size", [0, 1, 10, 12])
def test_samples_are_those_of_the_data_set(size: int) -> None:
    reader, chunks = MappedFormat(Squares(size), chunk_samples=4), NothingToFetch()
    index = reader.index()
    assert index.num_samples == size
    assert index.size_bytes == 0
    samples = []
    for number in range(index.num_chunks):
        chunk = index.chunk(number)
        chunks.expect([chunk])
        opened = reader.open(chunks.place(chunk), chunk, index.properties, Decoded())
        samples += [opened.sample(position) for position in range(chunk.num_samples)]
        with pytest.raises(IndexError):
            opened.sample(chunk.num_samples)
        opened.close()
    chunks.close()
    assert samples == [number**2 for number in range(size)]


def test_another_size_is_another_fingerprint() -> None:
    assert MappedFormat(Squares(9)).index().fingerprint != MappedFormat(Squares(10)).index().fingerprint


def test_data_sets_without_a_length_are_refused() -> None:
    with pytest.raises(ForeignDataError, match="generator has no length"):
        MappedFormat(dataset=(number for number in range(3))).index()  # type: ignore[arg-type]
