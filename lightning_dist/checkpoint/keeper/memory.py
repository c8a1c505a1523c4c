"""Files in memory, in folders, with a bound on their bytes. Any thread may call it.

Each file is a ``memfd``: memory that has no name which a crash could leave behind, and that the kernel takes back when
the process ends.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


class FullError(Exception):
    """There is no room, and nothing older that could go."""


@dataclass
class _Folder:
    files: dict[str, KeptFile] = field(default_factory=dict)


class KeptFile:
    """A file that is being written, or whole.

    Attributes:
        size_bytes: So far.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("hierdist-kept", os.MFD_CLOEXEC)
        self.size_bytes = 0

    def append(self, data: memoryview) -> None:
        """Write more at its end."""
        while data:
            count = os.write(self._fd, data)
            self.size_bytes += count
            data = data[count:]

    def duplicate(self) -> int:
        """A descriptor of the same memory, which stays when the file is dropped; the caller closes it."""
        return os.dup(self._fd)

    def close(self) -> None:
        """Give the memory back, once nobody has a duplicate."""
        os.close(self._fd)


class KeptFiles:
    """All files of a keeper.

    Folders are ordered by when they were begun. Where there is no room for more, the oldest go, but never the one that
    is written to.

    Args:
        limit_bytes: The bound.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._lock = threading.Lock()
        self._folders: dict[str, _Folder] = {}
        self._limit_bytes = limit_bytes
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Of all files, those being written too."""
        return self._used_bytes

    @property
    def limit_bytes(self) -> int:
        """The bound."""
        return self._limit_bytes

    def set_limit(self, limit_bytes: int) -> None:
        """Another bound; the oldest folders go, until the rest fits."""
        with self._lock:
            self._limit_bytes = limit_bytes
            while self._used_bytes > limit_bytes and self._folders:
                self._drop(next(iter(self._folders)))

    def write(self, folder: str, name: str, parts: Iterator[memoryview]) -> int:
        """Write a file; it is there once all parts are, and what was there before is there until then.

        Returns:
            Its size in bytes.

        Raises:
            FullError: It does not fit.
        """
        with self._lock:
            self._folders.setdefault(folder, _Folder())
        file, reserved_bytes = KeptFile(), 0
        try:
            for part in parts:
                self._reserve(folder, len(part))
                reserved_bytes += len(part)
                file.append(part)
        except BaseException:
            with self._lock:
                self._used_bytes -= reserved_bytes - file.size_bytes  # the machine may have less than the bound
                self._close(file)
            raise
        with self._lock:
            files = self._folders.setdefault(folder, _Folder()).files  # it may have been dropped meanwhile
            before = files.pop(name, None)
            files[name] = file
            if before is not None:
                self._close(before)
        return file.size_bytes

    def open(self, folder: str, name: str) -> tuple[int, int] | None:
        """Descriptor and size of a file; ``None`` if there is none. The caller closes it."""
        with self._lock:
            file = self._folders.get(folder, _Folder()).files.get(name)
            return None if file is None else (file.duplicate(), file.size_bytes)

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
        """Drop all folders but one."""
        with self._lock:
            for other in [each for each in self._folders if each != folder]:
                self._drop(other)

    def _reserve(self, folder: str, size_bytes: int) -> None:
        with self._lock:
            while self._used_bytes + size_bytes > self._limit_bytes:
                older = next((name for name in self._folders if name != folder), None)
                if older is None:
                    raise FullError(
                        f"{self._used_bytes} of {self._limit_bytes} bytes are used, and {size_bytes} more are needed"
                    )
                self._drop(older)
            self._used_bytes += size_bytes

    def _drop(self, folder: str) -> None:
        for file in self._folders.pop(folder).files.values():
            self._close(file)

    def _close(self, file: KeptFile) -> None:
        self._used_bytes -= file.size_bytes
        file.close()
