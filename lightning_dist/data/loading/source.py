"""One data set that samples are read from, in whichever process that is."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from lightning_dist.data.cache.cached_chunks import CacheOptions, open_chunks
from lightning_dist.data.decoded import Decoded
from lightning_dist.data.formats import make_format
from lightning_dist.data.formats.detection import detect_format
from lightning_dist.data.formats.mapped import MappedFormat, NothingToFetch, check_mapped
from lightning_dist.data.index.dataset_index import DatasetIndex
from lightning_dist.data.index.index_file import IndexElsewhere
from lightning_dist.data.order.mixture import check_weight
from lightning_dist.data.reading import Chunks, Format, OpenChunk, ReadFolder, open_chunk
from lightning_dist.data.storage.shards import open_read_folder
from lightning_dist.errors import ConfigError

_STRIPES = 16
_STAND_INS = 16


class Source:
    """A data set.

    Args:
        data: Its folder, as a path or URL, or a map-style data set.
        weight: Of its samples in a mixture of several.
        format: Its name, or the format itself; by default what the folder says.
        storage_options: For fsspec's file system. They are not stored anywhere and not printed.
        index_url: Folder with its index, if that does not lie beside the data.

    Raises:
        ConfigError: The weight is not positive, there is no name, or something was given that a map-style data set has
            no use for.
        ForeignDataError: It is neither a name nor a data set with a length.
    """

    def __init__(
        self,
        data: Any,
        *,
        weight: float = 1.0,
        format: str | Format | None = None,  # noqa: A002 - its name everywhere
        storage_options: Mapping[str, Any] | None = None,
        index_url: str | os.PathLike[str] | None = None,
    ) -> None:
        check_weight("a Source", weight)
        self.weight = weight
        self.cache = CacheOptions()
        self.keep_open = 64
        self.decoded_limit_bytes: int | None = None
        self._url = os.fspath(data) if isinstance(data, str | os.PathLike) else None
        if self._url == "":
            raise ConfigError("a Source has an empty name: write the folder of its data, as a path or URL")
        self._given_format = format
        self._storage_options = storage_options
        self._index_url = index_url
        self._here: _Opened | None = None
        if self._url is None:
            if format is not None or storage_options is not None or index_url is not None:
                raise ConfigError(
                    f"format, storage_options and index_url are of folders; {type(data).__name__} is a data set"
                )
            check_mapped(data)
            self._given_format = MappedFormat(data)

    @property
    def name(self) -> str:
        """For messages: its URL, or the type of the data set."""
        return self._url if self._url is not None else str(self.index.properties["type"])

    @property
    def is_mapped(self) -> bool:
        """Whether it is a map-style data set, whose code is the user's."""
        return isinstance(self._given_format, MappedFormat)

    @property
    def is_fetched(self) -> bool:
        """Whether its shards are not on this host."""
        return self._url is not None and "://" in self._url and not self._url.startswith("file://")

    @cached_property
    def format(self) -> Format:
        """How its files hold samples."""
        given = self._given_format
        if given is None:
            given = detect_format(self._folder)
        return make_format(given) if isinstance(given, str) else given

    @cached_property
    def index(self) -> DatasetIndex:
        """What it consists of; read once."""
        if isinstance(self.format, MappedFormat):
            return self.format.index()
        return self.format.index(self._folder)

    def read(self, chunk: int, sample: int) -> Any:
        """One sample; any thread may ask.

        Raises:
            UnreadableShardError: Its chunk cannot be read.
            DataCacheError: The cache cannot hold it.
        """
        return self._opened().chunk(chunk).sample(sample)

    def stand_ins(self, chunk: int, sample: int) -> Iterator[tuple[int, int]]:
        """Chunk and sample of a few that lie spread over the data, for one that cannot be read."""
        samples = self.index.samples
        away = min(len(samples), _STAND_INS + 1)
        for number in range(1, away):
            other = (chunk + number * len(samples) // away) % len(samples)
            if samples[other]:
                yield other, sample % int(samples[other])

    def expect(self, chunks: Iterable[int]) -> None:
        """These are needed next, in this order."""
        self._opened().chunks.expect(self.index.chunk(number) for number in chunks)

    def taken_counts(self) -> Mapping[str, float]:
        """What this process counted since the last call; see :data:`~lightning_dist.data.cache.host_chunks.Count`."""
        return self._opened().counts.taken()

    def close(self) -> None:
        """End what this process has open. Safe to call twice; the next call opens it again."""
        here, self._here = self._here, None
        if here is not None and here.pid == os.getpid():
            here.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_here": None}

    @cached_property
    def _folder(self) -> ReadFolder:
        assert self._url is not None, "a map-style data set has none"
        folder = open_read_folder(self._url, storage_options=self._storage_options)
        if self._index_url is None:
            return folder
        return IndexElsewhere(folder, open_read_folder(self._index_url, storage_options=self._storage_options))

    def _opened(self) -> _Opened:
        here = self._here
        if here is None or here.pid != os.getpid():  # a forked worker inherits what its threads cannot use
            here = self._here = _Opened(self)
        return here

    def chunks_here(self, count: Counts) -> Chunks:
        """The chunks, for one process."""
        if isinstance(self.format, MappedFormat):
            return NothingToFetch()
        return open_chunks(self._folder, self.index, options=self.cache, count=count)


class Counts:
    """Counters of a process; any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}

    def __call__(self, name: str, value: float) -> None:
        """Add to a counter."""
        with self._lock:
            self._values[name] = self._values.get(name, 0) + value

    def taken(self) -> Mapping[str, float]:
        """All of them, which begin at 0 again."""
        with self._lock:
            values, self._values = self._values, {}
        return values


class _Opened:
    """What one process has open of a source; the chunks used last stay open."""

    def __init__(self, source: Source) -> None:
        self.pid = os.getpid()
        self.counts = Counts()
        self._source = source
        self.chunks = source.chunks_here(self.counts)
        self._decoded = Decoded(source.decoded_limit_bytes)
        self._open: OrderedDict[int, OpenChunk] = OrderedDict()
        self._lock = threading.Lock()
        self._opening = [threading.Lock() for _ in range(_STRIPES)]  # a chunk is opened once, however many ask

    def chunk(self, number: int) -> OpenChunk:
        found = self._found(number)
        if found is not None:
            return found
        with self._opening[number % _STRIPES]:
            found = self._found(number)
            if found is not None:
                return found
            source = self._source
            chunk = source.index.chunk(number)
            found = open_chunk(self.chunks, source.format, chunk, source.index.properties, self._decoded)
            with self._lock:
                self._open[number] = found
                while len(self._open) > source.keep_open:
                    self._open.popitem(last=False)  # not closed: another thread may be reading from it
        return found

    def close(self) -> None:
        self.chunks.close()
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def _found(self, number: int) -> OpenChunk | None:
        with self._lock:
            found = self._open.get(number)
            if found is not None:
                self._open.move_to_end(number)
        return found
