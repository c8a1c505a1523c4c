"""Files in memory, in folders, with a bound on their bytes. Any thread may call it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lightning_dist.checkpoint.keeper.kept_file import KeptFile, room_for


class FullError(Exception):
    """There is no room, and nothing older that could go."""


@dataclass
class _Folder:
    files: dict[str, KeptFile] = field(default_factory=dict)


class KeptFiles:
    """All files of a keeper.

    Folders are ordered by when they were begun. Where there is no room for more, the oldest go, but never the one that
    is written to. Memory of what was filled in place and then dropped is filled again by the next.

    Args:
        limit_bytes: The bound.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._lock = threading.Lock()
        self._folders: dict[str, _Folder] = {}
        self._spares: list[KeptFile] = []
        self._limit_bytes = limit_bytes
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Of all files, those being written too, and of memory that waits to be filled again."""
        return self._used_bytes

    @property
    def limit_bytes(self) -> int:
        """The bound."""
        return self._limit_bytes

    def set_limit(self, limit_bytes: int) -> None:
        """Another bound; the oldest folders go, until the rest fits."""
        with self._lock:
            self._limit_bytes = limit_bytes
            self._clear_spares()
            while self._used_bytes > limit_bytes and self._folders:
                self._drop(next(iter(self._folders)))

    def write(self, folder: str, name: str, parts: Iterator[memoryview]) -> int:
        """Write a file; it is there once all parts are, and what was there before is there until then.

        Returns:
            Its size in bytes.

        Raises:
            FullError: It does not fit.
        """
        self._begin(folder)
        file, reserved_bytes = KeptFile(), 0
        try:
            for part in parts:
                self._reserve(folder, len(part))
                reserved_bytes += len(part)
                file.append(part)
        except BaseException:
            with self._lock:
                self._used_bytes -= reserved_bytes - file.room_bytes  # the machine may have less than the bound
                self._close(file)
            raise
        self._place(folder, name, file)
        return file.size_bytes

    def fill(self, folder: str, name: str, size_bytes: int, receive: Callable[[memoryview], None]) -> None:
        """The same for a file of a known size, in memory of one that was dropped if there is any.

        Args:
            folder: Whose.
            name: Its own.
            size_bytes: Its size.
            receive: Fills it.

        Raises:
            FullError: It does not fit; nothing has been received.
        """
        self._begin(folder)
        file = self._take_spare(size_bytes)
        try:
            self._reserve(folder, max(0, room_for(size_bytes) - file.room_bytes))
        except FullError:
            with self._lock:
                self._close(file)
            raise
        before_bytes = file.room_bytes
        try:
            with file.room(size_bytes) as view:
                receive(view)
        except BaseException:
            with self._lock:
                self._used_bytes -= max(0, room_for(size_bytes) - before_bytes) - (file.room_bytes - before_bytes)
                self._close(file)
            raise
        file.size_bytes = size_bytes
        self._place(folder, name, file)

    def put(self, folder: str, name: str, descriptor: int, size_bytes: int) -> None:
        """Take memory that somebody has filled for a file; the descriptor is closed in any case.

        Raises:
            FullError: It does not fit.
            ValueError: It is smaller than said.
        """
        file = KeptFile(descriptor)
        try:
            if not 0 <= size_bytes <= file.room_bytes:
                raise ValueError(f"{size_bytes} bytes of {file.room_bytes}")
            self._begin(folder)
            self._reserve(folder, file.room_bytes)
        except BaseException:
            file.close()
            raise
        file.size_bytes = size_bytes
        self._place(folder, name, file)

    @contextlib.contextmanager
    def reading(self, folder: str, name: str) -> Iterator[tuple[int, int] | None]:
        """Inside, descriptor and size of a file, also if it is dropped meanwhile; ``None`` if there is none."""
        with self._lock:
            file = self._folders.get(folder, _Folder()).files.get(name)
            if file is not None:
                file.readers += 1
                opened = file.duplicate(), file.size_bytes
        if file is None:
            yield None
            return
        try:
            yield opened
        finally:
            os.close(opened[0])
            with self._lock:
                file.readers -= 1

    def list(self, folder: str) -> dict[str, int]:
        """Files of a folder, with their sizes."""
        with self._lock:
            return {name: file.size_bytes for name, file in self._folders.get(folder, _Folder()).files.items()}

    def folders(self) -> Sequence[str]:
        """Names of folders, the oldest first."""
        with self._lock:
            return tuple(self._folders)

    def remove(self, folder: str, name: str) -> None:
        """Drop a file, if it is there, and its folder with the last one."""
        with self._lock:
            files = self._folders.get(folder, _Folder()).files
            if (file := files.pop(name, None)) is not None:
                self._close(file)
            if not files:
                self._folders.pop(folder, None)

    def keep(self, folder: str | None) -> None:
        """Drop all folders but one; what was filled in place in them is filled again by what comes next."""
        with self._lock:
            self._clear_spares()  # nobody has wanted them since the last time
            for other in [each for each in self._folders if each != folder]:
                self._drop(other, spares=folder is not None)

    def _begin(self, folder: str) -> None:
        with self._lock:
            self._folders.setdefault(folder, _Folder())

    def _place(self, folder: str, name: str, file: KeptFile) -> None:
        with self._lock:
            files = self._folders.setdefault(folder, _Folder()).files  # it may have been dropped meanwhile
            before = files.pop(name, None)
            files[name] = file
            if before is not None:
                self._close(before)

    def _take_spare(self, size_bytes: int) -> KeptFile:
        """The smallest that is large enough; else the largest, which grows."""
        with self._lock:
            if not self._spares:
                return KeptFile()
            fitting = [each for each in self._spares if each.room_bytes >= size_bytes]
            spare = (
                min(fitting, key=lambda each: each.room_bytes)
                if fitting
                else max(self._spares, key=lambda each: each.room_bytes)
            )
            self._spares.remove(spare)
            return spare

    def _reserve(self, folder: str, size_bytes: int) -> None:
        with self._lock:
            if self._used_bytes + size_bytes > self._limit_bytes:
                self._clear_spares()
            while self._used_bytes + size_bytes > self._limit_bytes:
                older = next((name for name in self._folders if name != folder), None)
                if older is None:
                    raise FullError(
                        f"{self._used_bytes} of {self._limit_bytes} bytes are used, and {size_bytes} more are needed"
                    )
                self._drop(older)
            self._used_bytes += size_bytes

    def _drop(self, folder: str, *, spares: bool = False) -> None:
        for file in self._folders.pop(folder).files.values():
            if spares and file.is_mapped and not file.readers:
                self._spares.append(file)
            else:
                self._close(file)

    def _clear_spares(self) -> None:
        spares, self._spares = self._spares, []
        for file in spares:
            self._close(file)

    def _close(self, file: KeptFile) -> None:
        self._used_bytes -= file.room_bytes
        file.close()
