"""An index as a file beside the data, or in a folder of its own where the data cannot be written to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_dist.data.index.dataset_index import KIND, DatasetIndex
from lightning_dist.data.reading import ReadFolder
from lightning_dist.errors import ForeignDataError

INDEX_NAME = "index.json"
PACKED_NAME = "packed.json"
"""The index of the same shards as packed documents."""
PLAN_NAME = ".written.json"
"""What token shards are written from; there before the index is."""


def read_json(folder: ReadFolder, name: str) -> Any:
    """What a JSON file holds; ``None`` if there is no such file.

    Raises:
        ForeignDataError: It is not JSON.
    """
    found = folder.read(name)
    if found is None:
        return None
    try:
        return json.loads(found)
    except (ValueError, RecursionError) as error:
        raise ForeignDataError(f"{place_of(folder, name)} is not JSON, or was cut off: {error}") from error


def is_index(found: Any) -> bool:
    """Whether JSON is an index of this library; other libraries also call theirs ``index.json``."""
    return isinstance(found, dict) and found.get("kind") == KIND


def read_index(folder: ReadFolder, *, format_name: str, name: str = INDEX_NAME) -> DatasetIndex:
    """The index that a folder has, written by ``hierdist data write`` or ``index``.

    Args:
        folder: Of the data set.
        format_name: The format that the index must be of.
        name: Of the file.

    Raises:
        ForeignDataError: There is none, or it is damaged or of another format.
    """
    found = read_json(folder, name)
    if found is None:
        refuse_half_written(folder)
        raise ForeignDataError(
            f"{folder.url} has no {name}, which says how many samples each file has: write one with "
            f"hierdist data index {folder.url} --format {format_name}, and with --out FOLDER if that place is read-only"
        )
    index = DatasetIndex.from_json(found, place_of(folder, name))
    if index.format != format_name:
        raise ForeignDataError(
            f"{place_of(folder, name)} is of the format {index.format}, not {format_name}: "
            f"read it as {index.format}, or write another with hierdist data index --format {format_name}"
        )
    return index


def refuse_half_written(folder: ReadFolder) -> None:
    """Refuse token shards whose writing was ended before all were written.

    Raises:
        ForeignDataError: They are such.
    """
    if folder.read(PLAN_NAME) is not None and folder.read(INDEX_NAME) is None:
        raise ForeignDataError(
            f"{folder.url} is half written: start hierdist data write again with the same arguments, which goes on"
        )


def index_bytes(index: DatasetIndex) -> bytes:
    """What the file holds; the same index always gives the same bytes."""
    return json.dumps(index.to_json(), sort_keys=True, separators=(",", ":")).encode() + b"\n"


def place_of(folder: ReadFolder, name: str) -> str:
    """A file's name for messages."""
    return f"{folder.url.rstrip('/')}/{name}"


class IndexElsewhere:
    """A folder whose index lies in another one.

    Args:
        folder: Of the data.
        index_folder: What ``hierdist data index --out`` was given.
        names: Of the files that are taken from there.
    """

    def __init__(
        self, folder: ReadFolder, index_folder: ReadFolder, *, names: tuple[str, ...] = (INDEX_NAME, PACKED_NAME)
    ) -> None:
        self._folder = folder
        self._index_folder = index_folder
        self._names = names
        self.url, self.origin = folder.url, folder.origin

    def read(self, name: str) -> bytes | None:
        """See :class:`~lightning_dist.data.reading.ReadFolder`."""
        return (self._index_folder if name in self._names else self._folder).read(name)

    def read_range(self, name: str, start: int, size_bytes: int) -> bytes:
        """See :class:`~lightning_dist.data.reading.ReadFolder`."""
        return self._folder.read_range(name, start, size_bytes)

    def sizes(self) -> dict[str, int]:
        """See :class:`~lightning_dist.data.reading.ReadFolder`."""
        return self._folder.sizes()

    def local_path(self, name: str) -> Path | None:
        """See :class:`~lightning_dist.data.reading.ReadFolder`."""
        return self._folder.local_path(name)
