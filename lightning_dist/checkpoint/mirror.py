"""A checkpoint's folder that keeps a second one in memory: what is written to storage is written to keepers, too.

The two are committed together, memory first, so that what is newest in memory is never older than storage::

    every rank    its file        to the keeper of its host, then to storage
    coordinator   the manifest    to every keeper, then to storage
    coordinator   the marker      to every keeper, if together they have all files, then to storage

What is written to memory only, more often, takes the first half of each line.

A keeper that fails costs the copy, not the checkpoint: its failure is a warning, and older copies are dropped, since
storage is about to have something newer. Storage comes last, too, because what iterates a file's bytes to their end is
what checksums are taken from.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

from lightning_dist.checkpoint.keeper.folder import KeptFolder
from lightning_dist.checkpoint.manifest import MARKER_FILE, parse
from lightning_dist.checkpoint.save_ids import is_manifest
from lightning_dist.checkpoint.storage import Buffer, Folder
from lightning_dist.errors import StorageError


class MemoryFolder:
    """See :class:`lightning_dist.checkpoint.storage.Folder`: a checkpoint that no storage has.

    A keeper that fails, or a file that none of them has, fails the save; older ones stay.

    Args:
        memory: A folder of keepers that no other save has.

    Attributes:
        written: Files that this rank's keeper has taken.
    """

    def __init__(self, memory: KeptFolder) -> None:
        self._memory = memory
        self._sizes: dict[str, int] = {}
        self.url = memory.url
        self.written: list[str] = []

    def child(self, name: str) -> Folder:
        """See ``Folder``."""
        return self._memory.child(name)

    def write(self, name: str, buffers: Iterable[Buffer]) -> None:
        """See ``Folder``."""
        if is_manifest(name):
            data = b"".join(buffers)
            manifest = parse(data, name)
            self._sizes = {file: entry.size for file, entry in manifest.files.items()}
            self._sizes[name] = len(data)
            self._memory.write_everywhere(name, [data])
        elif name == MARKER_FILE:
            there = self._memory.list()
            missing = next((file for file, size in self._sizes.items() if there.get(file) != size), None)
            if missing is not None:
                raise StorageError(f"{self.url} lacks {missing}")
            self._memory.write_everywhere(name, buffers)
        else:
            self._memory.write(name, buffers)
            self.written.append(name)

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        """See ``Folder``."""
        self._memory.read_into(name, start, target)

    def read(self, name: str) -> bytes | None:
        """See ``Folder``."""
        return self._memory.read(name)

    def list(self) -> dict[str, int | None]:
        """See ``Folder``."""
        return self._memory.list()

    def remove(self, name: str) -> None:
        """See ``Folder``."""
        self._memory.remove(name)

    def forget_all(self) -> None:
        """Drop all that the keepers have."""
        self._memory.forget_all()


class MirroredFolder:
    """See :class:`lightning_dist.checkpoint.storage.Folder`; read, listed and cleared in storage only.

    Args:
        storage: The checkpoint's folder.
        memory: A folder of keepers that no other save has.
    """

    def __init__(self, storage: Folder, memory: KeptFolder) -> None:
        self._storage = storage
        self._memory = MemoryFolder(memory)
        self.url = storage.url

    @property
    def written(self) -> Sequence[str]:
        """Files that this rank's keeper has taken."""
        return self._memory.written

    def child(self, name: str) -> Folder:
        """See ``Folder``; of storage."""
        return self._storage.child(name)

    def write(self, name: str, buffers: Iterable[Buffer]) -> None:
        """See ``Folder``."""
        if is_manifest(name):
            data = b"".join(buffers)
            self._try(lambda: self._memory.write(name, [data]))
        elif name == MARKER_FILE:
            self._try(lambda: self._commit(buffers))
        else:
            self._try(lambda: self._memory.write(name, buffers))
        self._storage.write(name, buffers)

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        """See ``Folder``; from storage."""
        self._storage.read_into(name, start, target)

    def read(self, name: str) -> bytes | None:
        """See ``Folder``; from storage."""
        return self._storage.read(name)

    def list(self) -> dict[str, int | None]:
        """See ``Folder``; of storage."""
        return self._storage.list()

    def remove(self, name: str) -> None:
        """See ``Folder``; from storage."""
        self._storage.remove(name)

    def _commit(self, marker: Iterable[Buffer]) -> None:
        try:
            self._memory.write(MARKER_FILE, marker)
        except StorageError as error:
            self._memory.forget_all()
            raise StorageError(f"{error}; older ones are dropped") from error

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except StorageError as error:
            warnings.warn(f"a checkpoint is not kept in memory: {error}", stacklevel=3)
