"""Folders for tests of data: read without a cache, with what was read counted."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lightning_dist.data.decoded import Decoded
from lightning_dist.data.index.dataset_index import Chunk, DatasetIndex
from lightning_dist.data.reading import Format, OpenChunk, Place
from lightning_dist.errors import UnreadableShardError


class PathFolder:
    """A folder on disk as a :class:`~lightning_dist.data.reading.ReadFolder`.

    Attributes:
        bytes_read: By the name of a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = self.origin = str(path)
        self.bytes_read: Counter[str] = Counter()

    def read(self, name: str) -> bytes | None:
        path = self.path / name
        return path.read_bytes() if path.is_file() else None

    def read_range(self, name: str, start: int, size_bytes: int) -> bytes:
        try:
            found = (self.path / name).read_bytes()[start : start + size_bytes]
        except OSError as error:
            raise UnreadableShardError(str(error)) from error
        if len(found) != size_bytes:
            raise UnreadableShardError(f"{name} ends before byte {start + size_bytes}")
        self.bytes_read[name] += len(found)
        return found

    def sizes(self) -> dict[str, int]:
        files = sorted(path for path in self.path.rglob("*") if path.is_file())
        return {path.relative_to(self.path).as_posix(): path.stat().st_size for path in files}

    def local_path(self, name: str) -> Path | None:
        return self.path / name


def place_of(folder: Path, chunk: Chunk) -> Place:
    """Where a chunk lies: in the shard itself."""
    return Place(folder / chunk.shard, chunk.start, chunk.size_bytes)


def cached_place(folder: Path, chunk: Chunk, cache: Path) -> Place:
    """Where a chunk lies if it was fetched alone, into a file that has something else before and after it."""
    data = (folder / chunk.shard).read_bytes()[chunk.start : chunk.start + chunk.size_bytes]
    path = cache / f"chunk-{chunk.number}"
    path.write_bytes(b"before" + data + b"after")
    return Place(path, 6, chunk.size_bytes)


def open_chunk(reader: Format, folder: Path, index: DatasetIndex, number: int) -> OpenChunk:
    chunk = index.chunk(number)
    return reader.open(place_of(folder, chunk), chunk, index.properties, Decoded())


def all_samples(reader: Format, folder: Path, index: DatasetIndex, *, cache: Path | None = None) -> list[Any]:
    """Every sample, in order, each chunk fetched alone if there is a cache."""
    samples = []
    for number in range(index.num_chunks):
        chunk = index.chunk(number)
        place = place_of(folder, chunk) if cache is None else cached_place(folder, chunk, cache)
        opened = reader.open(place, chunk, index.properties, Decoded())
        samples += [opened.sample(position) for position in range(chunk.num_samples)]
        opened.close()
        opened.close()
    return samples


class EndedWriting(BaseException):
    """Stands for the end of a process while it writes."""


class EndingFolder:
    """A folder to write to that ends the writing before its operation of a number, as a killed process does.

    Attributes:
        operations: Done so far.
        written: Names of files, in the order they were written.
    """

    def __init__(self, folder: Any, *, end_before: int | None = None) -> None:
        self._folder = folder
        self._end_before = end_before
        self.url: str = folder.url
        self.operations = 0
        self.written: list[str] = []

    def alone(self) -> AbstractContextManager[None]:
        alone: AbstractContextManager[None] = self._folder.alone()
        return alone

    def _count(self) -> None:
        if self.operations == self._end_before:
            raise EndedWriting
        self.operations += 1

    def write(self, name: str, data: bytes | memoryview) -> None:
        self._count()
        self._folder.write(name, data)
        self.written.append(name)

    def read(self, name: str) -> bytes | None:
        found: bytes | None = self._folder.read(name)
        return found

    def names(self) -> list[str]:
        found: list[str] = self._folder.names()
        return found

    def remove(self, name: str) -> None:
        self._count()
        self._folder.remove(name)


def contents(folder: Path) -> dict[str, bytes]:
    """Files of a folder, also hidden ones."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
