"""Folders of data sets, for reading: on disk, or at a URL through fsspec."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec

from lightning_dist.data.reading import ReadFolder
from lightning_dist.errors import DataError, UnreadableShardError


def open_read_folder(url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> ReadFolder:
    """The folder at a path or URL.

    Args:
        url: A path, ``file://``, or anything fsspec knows: ``memory://``, ``s3://``, ``gs://``, ...
        storage_options: For fsspec's file system. They are not stored anywhere and not printed.

    Raises:
        DataError: The protocol is unknown, or the package for it is not installed.
    """
    text = os.fspath(url)
    if "://" not in text:
        return LocalReadFolder(Path(text).expanduser(), text)
    try:
        file_system, path = fsspec.core.url_to_fs(text, **dict(storage_options or {}))
    except Exception as error:
        raise DataError(f"{text} cannot be opened: {type(error).__name__}: {error}") from error
    return (
        LocalReadFolder(Path(path), text) if text.startswith("file://") else RemoteReadFolder(file_system, path, text)
    )


class LocalReadFolder:
    """A folder on disk; see :class:`~lightning_dist.data.reading.ReadFolder`."""

    def __init__(self, path: Path, url: str) -> None:
        self._folder = path
        self.url = url

    def read(self, name: str) -> bytes | None:
        """See ``ReadFolder``."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UnreadableShardError(f"{self._folder / name} cannot be read: {error}") from error

    def read_range(self, name: str, start: int, size_bytes: int) -> bytes:
        """See ``ReadFolder``."""
        try:
            with (self._folder / name).open("rb") as file:
                file.seek(start)
                found = file.read(size_bytes)
        except OSError as error:
            raise UnreadableShardError(f"{self._folder / name} cannot be read: {error}") from error
        return _whole(found, self._folder / name, start, size_bytes)

    def sizes(self) -> dict[str, int]:
        """See ``ReadFolder``."""
        files = sorted((path.relative_to(self._folder).as_posix(), path) for path in self._folder.rglob("*"))
        return {name: path.stat().st_size for name, path in files if path.is_file()}

    def local_path(self, name: str) -> Path | None:
        """See ``ReadFolder``."""
        return self._folder / name


class RemoteReadFolder:
    """A folder of an fsspec file system; see :class:`~lightning_dist.data.reading.ReadFolder`."""

    def __init__(self, file_system: Any, path: str, url: str) -> None:
        self._fs = file_system
        self._path = path.rstrip("/")
        self.url = url

    def read(self, name: str) -> bytes | None:
        """See ``ReadFolder``."""
        try:
            return bytes(self._fs.cat_file(f"{self._path}/{name}"))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._unreadable(name, error) from error

    def read_range(self, name: str, start: int, size_bytes: int) -> bytes:
        """See ``ReadFolder``."""
        try:
            found = bytes(self._fs.cat_file(f"{self._path}/{name}", start=start, end=start + size_bytes))
        except Exception as error:
            raise self._unreadable(name, error) from error
        return _whole(found, f"{self.url}/{name}", start, size_bytes)

    def sizes(self) -> dict[str, int]:
        """See ``ReadFolder``."""
        try:
            found = self._fs.find(self._path, detail=True)
        except Exception as error:
            raise self._unreadable("", error) from error
        first = len(self._path) + 1
        return {path[first:]: int(entry["size"]) for path, entry in sorted(found.items())}

    def local_path(self, name: str) -> Path | None:
        """See ``ReadFolder``."""
        return None

    def _unreadable(self, name: str, error: Exception) -> UnreadableShardError:
        return UnreadableShardError(f"{self.url}/{name} cannot be read: {type(error).__name__}: {error}")


def _whole(found: bytes, place: object, start: int, size_bytes: int) -> bytes:
    if len(found) != size_bytes:
        raise UnreadableShardError(f"{place} ends at byte {start + len(found)}, {start + size_bytes} were expected")
    return found
