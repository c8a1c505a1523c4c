"""A folder on a local or mounted disk: files are written once from front to back, and reach the disk meanwhile.

Note: flushing. Without asking, the kernel begins to write dirty pages after seconds, and a sync at the end then waits
for all of them. A second thread syncs what has been written while the first goes on, so the disk is busy from the start
and the last sync is short. Both release the interpreter's lock while they wait.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from lightning_dist.retry import Retry

PARTIAL = ".partial"
"""How the name of a file ends that is not whole yet."""

_BATCH_BYTES = 4 << 20
_BATCH_BUFFERS = 512  # below IOV_MAX
_FLUSH_BYTES = 32 << 20
_Buffer = bytes | bytearray | memoryview
_T = TypeVar("_T")


class LocalFolder:
    """A folder on disk; see :class:`lightning_dist.checkpoint.storage.Folder`.

    Args:
        path: Of the folder.
        url: As the user gave it.
        retry: For errors that may pass (a mounted file system's).
    """

    def __init__(self, path: Path, url: str, retry: Retry) -> None:
        self._folder = path
        self._retry = retry
        self.url = url

    def child(self, name: str) -> LocalFolder:
        """See ``Folder``."""
        return LocalFolder(self._folder / name, f"{self.url.rstrip('/')}/{name}", self._retry)

    def write(self, name: str, buffers: Iterable[_Buffer]) -> None:
        """See ``Folder``. Under its final name from the start, if none is there: what is half written lacks the commit
        marker.
        """

        def attempt() -> None:
            _make(self._folder)
            path = self._folder / name
            if not path.exists():
                _write(path, buffers)
            else:
                fresh = self._folder / f"{name}.{secrets.token_hex(4)}{PARTIAL}"
                try:
                    _write(fresh, buffers)
                    os.replace(fresh, path)
                finally:
                    fresh.unlink(missing_ok=True)
            _sync_folder(self._folder)

        self._do("write", name, attempt)

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        """See ``Folder``."""

        def attempt() -> None:
            with open(self._folder / name, "rb", buffering=0) as file:
                file.seek(start)
                done = 0
                while done < len(target):
                    count = file.readinto(target[done:])
                    if not count:
                        raise EOFError(f"it ends at byte {start + done}, {start + len(target)} were expected")
                    done += count

        self._do("read", name, attempt)

    def read(self, name: str) -> bytes | None:
        """See ``Folder``."""

        def attempt() -> bytes | None:
            try:
                return (self._folder / name).read_bytes()
            except FileNotFoundError:
                return None

        return self._do("read", name, attempt)

    def list(self) -> dict[str, int | None]:
        """See ``Folder``."""

        def attempt() -> dict[str, int | None]:
            found: dict[str, int | None] = {}
            try:
                with os.scandir(self._folder) as entries:
                    for entry in entries:
                        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                            found[entry.name] = None if entry.is_dir() else entry.stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return {}
            return found

        return self._do("list", "", attempt)

    def remove(self, name: str) -> None:
        """See ``Folder``."""

        def attempt() -> None:
            path = self._folder / name if name else self._folder
            try:
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()
                else:
                    path.unlink()
            except FileNotFoundError:
                return
            _sync_folder(path.parent)

        self._do("remove", name, attempt)

    def _do(self, operation: str, name: str, attempt: Callable[[], _T]) -> _T:
        return self._retry.call(attempt, f"{operation} {self._folder / name}")


class _Flusher:
    """Syncs a file in a thread of its own while it is written; an error is raised when it ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._wake = threading.Condition()
        self._dirty_bytes = 0
        self._ended = False
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> _Flusher:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with self._wake:
            self._ended = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def written(self, size_bytes: int) -> None:
        """So many bytes more are in the file; the thread starts with the first that are worth it."""
        with self._wake:
            self._dirty_bytes += size_bytes
            if self._dirty_bytes < _FLUSH_BYTES:
                return
            self._wake.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hierdist-flush", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._ended or self._dirty_bytes >= _FLUSH_BYTES)
                if self._ended:
                    return
                self._dirty_bytes = 0
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                self._error = error
                return


def _write(path: Path, buffers: Iterable[_Buffer]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        with _Flusher(descriptor) as flusher:
            for batch in _batches(buffers):
                flusher.written(_write_all(descriptor, batch))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _batches(buffers: Iterable[_Buffer]) -> Iterable[Sequence[_Buffer]]:
    """Buffers in groups that one call writes: small ones are many."""
    batch: list[_Buffer] = []
    size_bytes = 0
    for buffer in buffers:
        batch.append(buffer)
        size_bytes += len(buffer)
        if size_bytes >= _BATCH_BYTES or len(batch) >= _BATCH_BUFFERS:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _write_all(descriptor: int, buffers: Sequence[_Buffer]) -> int:
    views = [memoryview(buffer) for buffer in buffers if len(buffer)]
    total = sum(len(view) for view in views)
    while views:
        count = os.writev(descriptor, views)
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]
    return total


def _make(folder: Path) -> None:
    """Make a folder and its parents; each is durable in its parent."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
