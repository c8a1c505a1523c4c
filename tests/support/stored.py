"""Storage of a test: the files of a folder as if they were on another machine, and a log of who read what."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np

from lightning_dist.data.index.dataset_index import DatasetIndex
from lightning_dist.data.reading import Chunks
from lightning_dist.errors import UnreadableShardError

GATE_DEADLINE_S = 60.0


class Request(NamedTuple):
    """A line of the log."""

    pid: int
    name: str
    start: int
    size_bytes: int


@dataclass
class StoredFolder:
    """A :class:`~lightning_dist.data.reading.ReadFolder` that any process may have a copy of.

    Attributes:
        folder: With the files.
        log: Each request for a range is a line of this file.
        gate: While this file exists, requests wait.
        url: What it says it is.
    """

    folder: Path
    log: Path
    gate: Path | None = None
    url: str = "stored://data"
    origin: str = "stored://data"

    def read(self, name: str) -> bytes | None:
        path = self.folder / name
        return path.read_bytes() if path.exists() else None

    def read_range(self, name: str, start: int, size_bytes: int) -> bytes:
        with open(self.log, "ab", buffering=0) as log:
            log.write(f"{os.getpid()} {name} {start} {size_bytes}\n".encode())
        end = time.monotonic() + GATE_DEADLINE_S
        while self.gate is not None and self.gate.exists():
            assert time.monotonic() < end, "nobody opened the gate"
            time.sleep(0.002)
        try:
            with open(self.folder / name, "rb") as file:
                file.seek(start)
                data = file.read(size_bytes)
        except FileNotFoundError as error:
            raise UnreadableShardError(f"cannot read {self.url}/{name}: it is not there") from error
        if len(data) < size_bytes:
            raise UnreadableShardError(f"cannot read {self.url}/{name}: cut short")
        return data

    def sizes(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in sorted(self.folder.iterdir())}

    def local_path(self, name: str) -> Path | None:
        return None

    def requests(self) -> list[Request]:
        """What was asked for so far."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [Request(int(pid), name, int(start), int(size)) for pid, name, start, size in map(str.split, lines)]

    def times_read(self) -> Counter[int]:
        """How often each byte of the files was read -> how many bytes were read so often."""
        reads: Counter[tuple[str, int]] = Counter()
        for request in self.requests():
            reads.update((request.name, byte) for byte in range(request.start, request.start + request.size_bytes))
        return Counter(reads.values())


def store(
    folder: Path, *, num_shards: int, chunks_per_shard: int, chunk_bytes: int, checksums: bool = True
) -> DatasetIndex:
    """Write shards of chunks of bytes, and return their index."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    names, sums = [f"{shard}.bin" for shard in range(num_shards)], []
    for name in names:
        chunks = [random.bytes(chunk_bytes) for _ in range(chunks_per_shard)]
        (folder / name).write_bytes(b"".join(chunks))
        sums += [crc32(chunk) for chunk in chunks]
    count = num_shards * chunks_per_shard
    return DatasetIndex(
        format="bytes",
        shards=tuple(names),
        shard_of=np.repeat(np.arange(num_shards), chunks_per_shard),
        starts=np.tile(np.arange(chunks_per_shard) * chunk_bytes, num_shards),
        sizes=np.full(count, chunk_bytes),
        samples=np.ones(count, dtype=np.int64),
        crc32=np.asarray(sums) if checksums else None,
    )


def read_chunk(chunks: Chunks, index: DatasetIndex, number: int) -> bytes:
    """The bytes of a chunk, as a reader opens them: placed again if it was removed in between."""
    while True:
        place = chunks.place(index.chunk(number))
        try:
            with open(place.path, "rb") as file:
                file.seek(place.start)
                return file.read(place.size_bytes)
        except FileNotFoundError:
            continue


def stored_chunk(folder: Path, index: DatasetIndex, number: int) -> bytes:
    """What they should be."""
    chunk = index.chunk(number)
    return (folder / chunk.shard).read_bytes()[chunk.start : chunk.start + chunk.size_bytes]
