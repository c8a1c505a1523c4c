"""Where a data set is written to: a folder on disk or at a URL, and the four operations that writing needs of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import fsspec

from lightning_dist.errors import DataError

_T = TypeVar("_T")


class WriteFolder(Protocol):
    """A folder of files; made when the first file is written.

    Attributes:
        url: As it was given.
    """

    url: str

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write a file; nobody sees a half of it, and it survives a power cut. What was there is replaced."""

    def read(self, name: str) -> bytes | None:
        """All of a file; ``None`` if there is none."""

    def names(self) -> list[str]:
        """Of the files in this folder, not of those below; empty if it is not there."""

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if it is not there."""


def open_write_folder(url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> WriteFolder:
    """The folder at a path or URL.

    Args:
        url: A path, ``file://``, or anything fsspec knows: ``memory://``, ``s3://``, ``gs://``, ...
        storage_options: For fsspec's file system. They are not stored anywhere and not printed.

    Raises:
        DataError: The protocol is unknown, or the package for it is not installed.
    """
    text = os.fspath(url)
    if "://" not in text:
        return LocalOutput(Path(text).expanduser(), text)
    try:
        file_system, path = fsspec.core.url_to_fs(text, use_listings_cache=False, **dict(storage_options or {}))
    except Exception as error:
        raise DataError(f"{text} cannot be opened: {type(error).__name__}: {error}") from error
    return LocalOutput(Path(path), text) if text.startswith("file://") else RemoteOutput(file_system, path, text)


class LocalOutput:
    """A folder on disk. A file is written under another name, flushed, and renamed.

    Args:
        path: Of the folder.
        url: As the user gave it.
    """

    def __init__(self, path: Path, url: str) -> None:
        self._folder = path
        self.url = url

    def write(self, name: str, data: bytes | memoryview) -> None:
        """See :class:`WriteFolder`. The same name is not written to by two at once."""

        def attempt() -> None:
            self._folder.mkdir(parents=True, exist_ok=True)
            half = self._folder / f".{name}.part"
            with half.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            half.replace(self._folder / name)
            self._sync()

        _do(attempt, "written", f"{self._folder / name}")

    def read(self, name: str) -> bytes | None:
        """See :class:`WriteFolder`."""

        def attempt() -> bytes | None:
            try:
                return (self._folder / name).read_bytes()
            except FileNotFoundError:
                return None

        return _do(attempt, "read", f"{self._folder / name}")

    def names(self) -> list[str]:
        """See :class:`WriteFolder`."""

        def attempt() -> list[str]:
            try:
                return sorted(entry.name for entry in self._folder.iterdir() if entry.is_file())
            except FileNotFoundError:
                return []

        return _do(attempt, "listed", f"{self._folder}")

    def remove(self, name: str) -> None:
        """See :class:`WriteFolder`."""

        def attempt() -> None:
            (self._folder / name).unlink(missing_ok=True)

        _do(attempt, "removed", f"{self._folder / name}")

    def _sync(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class RemoteOutput:
    """A folder of an fsspec file system. Object stores show a file once it is whole.

    Args:
        file_system: An fsspec file system.
        path: Of the folder in it.
        url: As the user gave it.
    """

    def __init__(self, file_system: Any, path: str, url: str) -> None:
        self._fs = file_system
        self._path = path.rstrip("/")
        self.url = url

    def write(self, name: str, data: bytes | memoryview) -> None:
        """See :class:`WriteFolder`."""

        def attempt() -> None:
            self._fs.pipe_file(f"{self._path}/{name}", bytes(data))

        _do(attempt, "written", self._at(name))

    def read(self, name: str) -> bytes | None:
        """See :class:`WriteFolder`."""

        def attempt() -> bytes | None:
            try:
                return bytes(self._fs.cat_file(f"{self._path}/{name}"))
            except FileNotFoundError:
                return None

        return _do(attempt, "read", self._at(name))

    def names(self) -> list[str]:
        """See :class:`WriteFolder`."""

        def attempt() -> list[str]:
            try:
                entries = self._fs.ls(self._path, detail=True)
            except FileNotFoundError:
                return []
            return sorted(entry["name"].rpartition("/")[2] for entry in entries if entry["type"] == "file")

        return _do(attempt, "listed", self.url)

    def remove(self, name: str) -> None:
        """See :class:`WriteFolder`."""

        def attempt() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._path}/{name}")

        _do(attempt, "removed", self._at(name))

    def _at(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}"


def _do(attempt: Callable[[], _T], what: str, place: str) -> _T:
    try:
        return attempt()
    except Exception as error:
        raise DataError(f"{place} cannot be {what}: {type(error).__name__}: {error}") from error
