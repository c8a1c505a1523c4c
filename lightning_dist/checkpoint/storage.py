"""The seam to storage: a folder on disk or at a URL, and the five operations that checkpoints need of it.

Local folders are written with ``os``, everything else through fsspec. An operation either has done what it says,
durably, or raises :class:`StorageError` that names the operation, the place and the reason. Errors that may pass (a
lost connection, a server that is busy) are tried again, by :class:`Retry`; others are not.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import fsspec

from lightning_dist.checkpoint.local_disk import LocalFolder
from lightning_dist.errors import CheckpointError, StorageError
from lightning_dist.retry import Retry, failed

Buffer = bytes | bytearray | memoryview
_T = TypeVar("_T")


class Folder(Protocol):
    """A folder of files; made when the first file is written.

    Attributes:
        url: As it was given.
    """

    url: str

    def child(self, name: str) -> Folder:
        """The folder of a name in this one; nothing is made."""

    def write(self, name: str, buffers: Iterable[Buffer]) -> None:
        """Write a file; when this returns, it survives a power cut. What was there is replaced, at once: whoever reads
        meanwhile, or after this was cut off, has the old one or the new one.

        Args:
            name: Of a file in this folder.
            buffers: Its bytes, in parts. May be iterated again from the start, if storage asks for another try.
        """

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        """Fill ``target`` from byte ``start`` on; a file that ends before is a :class:`StorageError`."""

    def read(self, name: str) -> bytes | None:
        """All of a file; ``None`` if there is none."""

    def list(self) -> dict[str, int | None]:
        """Names in this folder -> size in bytes, ``None`` for a folder; empty if the folder is not there."""

    def remove(self, name: str) -> None:
        """Remove a file or an empty folder, durably; nothing happens if it is not there."""


def open_folder(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, retry: Retry | None = None
) -> Folder:
    """The folder at a path or URL.

    Args:
        url: A path, ``file://``, or anything fsspec knows: ``memory://``, ``s3://``, ``gs://``, ...
        storage_options: For fsspec's file system. They are not stored anywhere and not printed.
        retry: How errors that may pass are tried again.

    Raises:
        CheckpointError: The protocol is unknown, or the package for it is not installed.
    """
    text, retry = os.fspath(url), retry if retry is not None else Retry()
    if "://" not in text and "::" not in text:
        return LocalFolder(Path(text), text, retry)
    try:
        # Listings are asked for anew: other processes write too.
        file_system, path = fsspec.core.url_to_fs(text, use_listings_cache=False, **dict(storage_options or {}))
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{text} cannot be opened: {error}") from error
    except Exception as error:
        raise StorageError(f"{text} cannot be opened: {failed(error)}") from error
    if text.startswith("file://"):
        return LocalFolder(Path(path), text, retry)
    return RemoteFolder(file_system, path.rstrip("/"), text, retry)


class RemoteFolder:
    """A folder of an fsspec file system.

    Args:
        file_system: An fsspec file system.
        path: Of the folder in it.
        url: As the user gave it.
        retry: For errors that may pass.
    """

    def __init__(self, file_system: Any, path: str, url: str, retry: Retry) -> None:
        self._fs = file_system
        self._path = path
        self._retry = retry
        self.url = url

    def child(self, name: str) -> RemoteFolder:
        """See :class:`Folder`."""
        head, chain, rest = self.url.partition("::")
        url = (
            f"{self.url.rstrip('/')}/{name}" if not chain or "://" not in head else f"{head.rstrip('/')}/{name}::{rest}"
        )
        return RemoteFolder(self._fs, f"{self._path}/{name}", url, self._retry)

    def write(self, name: str, buffers: Iterable[Buffer]) -> None:
        """See :class:`Folder`. Object stores show a file once it is whole."""

        def attempt() -> None:
            file = self._open(name)
            try:
                for buffer in buffers:
                    file.write(buffer)
                file.close()
            except BaseException:
                _abandon(file, lambda: self._fs.rm_file(f"{self._path}/{name}"))
                raise

        self._do("write", name, attempt)

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        """See :class:`Folder`."""

        def attempt() -> None:
            data = self._fs.cat_file(f"{self._path}/{name}", start=start, end=start + len(target)) if target else b""
            if len(data) != len(target):
                raise EOFError(f"it ends at byte {start + len(data)}, {start + len(target)} were expected")
            target[:] = data

        self._do("read", name, attempt)

    def read(self, name: str) -> bytes | None:
        """See :class:`Folder`."""

        def attempt() -> bytes | None:
            try:
                return bytes(self._fs.cat_file(f"{self._path}/{name}"))
            except FileNotFoundError:
                return None

        return self._do("read", name, attempt)

    def list(self) -> dict[str, int | None]:
        """See :class:`Folder`."""

        def attempt() -> dict[str, int | None]:
            try:
                entries = self._fs.ls(self._path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
            # A listing of an object store may have the folder itself among its entries.
            others = [entry for entry in entries if entry["name"].strip("/") != self._path.strip("/")]
            found = {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in others}
            return {name: None if e["type"] == "directory" else int(e["size"]) for name, e in found.items() if name}

        return self._do("list", "", attempt)

    def remove(self, name: str) -> None:
        """See :class:`Folder`."""

        def attempt() -> None:
            path = f"{self._path}/{name}" if name else self._path
            with contextlib.suppress(FileNotFoundError):
                if self._fs.isdir(path):
                    self._fs.rmdir(path)
                else:
                    self._fs.rm_file(path)

        self._do("remove", name, attempt)

    def _open(self, name: str) -> Any:
        try:
            return self._fs.open(f"{self._path}/{name}", "wb")
        except FileNotFoundError:  # not before: in an object store, making a folder can make a bucket
            self._fs.makedirs(self._path, exist_ok=True)
            return self._fs.open(f"{self._path}/{name}", "wb")

    def _do(self, operation: str, name: str, attempt: Callable[[], _T]) -> _T:
        return self._retry.call(attempt, f"{operation} {self.url.rstrip('/')}/{name}".rstrip("/"))


def _abandon(file: Any, remove: Callable[[], None]) -> None:
    """Give up a file that is half written; the error that came first is the one to tell."""
    with contextlib.suppress(Exception):
        file.discard()
    with contextlib.suppress(Exception):
        file.closed = True  # closing it, which the collector does too, would make a file of what is there
    with contextlib.suppress(Exception):
        remove()
