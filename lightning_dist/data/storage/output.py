"""Where a data set is written to: a folder on disk or at a URL, and the few operations that writing needs of it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import fsspec

from lightning_dist.errors import DataError
from lightning_dist.retry import Retry, failed

_T = TypeVar("_T")
_HALF = ".part"


class WriteFolder(Protocol):
    """A folder of files; made when the first file is written.

    Attributes:
        url: As it was given.
    """

    url: str

    def alone(self) -> AbstractContextManager[None]:
        """Within, no other process of this host writes to the folder; waits until none does.

        At a URL nothing is waited for: files appear whole, and those who write the same do no harm.
        """

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
        raise DataError(f"{text} cannot be opened: {failed(error)}") from error
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

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """See :class:`WriteFolder`. The lock is on the folder itself and goes with the process, however that ends."""
        _do(lambda: self._folder.mkdir(parents=True, exist_ok=True), f"make {self._folder}")
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # some network file systems cannot lock folders
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def write(self, name: str, data: bytes | memoryview) -> None:
        """See :class:`WriteFolder`. The same name is not written to by two at once; see :meth:`alone`."""

        def attempt() -> None:
            self._folder.mkdir(parents=True, exist_ok=True)
            half = self._folder / f".{name}{_HALF}"
            try:
                with half.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                half.replace(self._folder / name)
            except Exception:
                half.unlink(missing_ok=True)
                raise
            self._sync()

        _do(attempt, f"write {self._folder / name}")

    def read(self, name: str) -> bytes | None:
        """See :class:`WriteFolder`."""

        def attempt() -> bytes | None:
            try:
                return (self._folder / name).read_bytes()
            except FileNotFoundError:
                return None

        return _do(attempt, f"read {self._folder / name}")

    def names(self) -> list[str]:
        """See :class:`WriteFolder`."""

        def attempt() -> list[str]:
            try:
                names = sorted(entry.name for entry in self._folder.iterdir() if entry.is_file())
            except FileNotFoundError:
                return []
            return [name for name in names if not (name.startswith(".") and name.endswith(_HALF))]

        return _do(attempt, f"list {self._folder}")

    def remove(self, name: str) -> None:
        """See :class:`WriteFolder`."""

        def attempt() -> None:
            (self._folder / name).unlink(missing_ok=True)

        _do(attempt, f"remove {self._folder / name}")

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

    def alone(self) -> AbstractContextManager[None]:
        """See :class:`WriteFolder`."""
        return contextlib.nullcontext()

    def write(self, name: str, data: bytes | memoryview) -> None:
        """See :class:`WriteFolder`."""

        def attempt() -> None:
            self._fs.pipe_file(f"{self._path}/{name}", bytes(data))

        _do(attempt, f"write {self._at(name)}")

    def read(self, name: str) -> bytes | None:
        """See :class:`WriteFolder`."""

        def attempt() -> bytes | None:
            try:
                return bytes(self._fs.cat_file(f"{self._path}/{name}"))
            except FileNotFoundError:
                return None

        return _do(attempt, f"read {self._at(name)}")

    def names(self) -> list[str]:
        """See :class:`WriteFolder`."""

        def attempt() -> list[str]:
            try:
                entries = self._fs.ls(self._path, detail=True)
            except FileNotFoundError:
                return []
            return sorted(entry["name"].rpartition("/")[2] for entry in entries if entry["type"] == "file")

        return _do(attempt, f"list {self.url}")

    def remove(self, name: str) -> None:
        """See :class:`WriteFolder`."""

        def attempt() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._path}/{name}")

        _do(attempt, f"remove {self._at(name)}")

    def _at(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}"


def _do(attempt: Callable[[], _T], what: str) -> _T:
    return Retry().call(attempt, what, refusal=DataError)
