"""A checkpoint on its way into the memory of keepers, by calls that are few and take each byte once.

The sequence; what stands on one line may happen at the same time on all ranks::

    every rank    room        its memory, to be filled
    every rank    hand_over   to the keeper of its host, without a copy
    every rank    spread      over the network to its buddy
    coordinator   commit      the manifest to every keeper; if together they have all files, the marker, with which
                              keepers drop what is older
    every rank    settle      once it knows how that has ended
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

from lightning_dist.checkpoint.keeper.client import Filled, Line
from lightning_dist.checkpoint.keeper.kept_file import KeptFile
from lightning_dist.checkpoint.keeper.messages import NoKeeperError
from lightning_dist.checkpoint.keeper.own_memory import OwnMemory
from lightning_dist.checkpoint.manifest import MARKER_FILE
from lightning_dist.checkpoint.rate import RateLimit
from lightning_dist.errors import StorageError


class Lines:
    """A rank's connections to keepers, and its memory; all saves of a run use the same. For one thread at a time.

    Args:
        keepers: Each once, this host's first.
        buddy: Which of them is this rank's on another host; ``None``: there is none.
        rate: Of what it sends there.
        part_bytes: How much of it at once.
        used: Told what the keeper of this host holds, in bytes.
    """

    def __init__(
        self,
        keepers: Sequence[Line],
        buddy: Line | None,
        *,
        rate: RateLimit,
        part_bytes: int,
        used: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        self.keepers = keepers
        self.buddy = buddy
        self.rate = rate
        self.part_bytes = part_bytes
        self.used = used
        self.memory = OwnMemory()

    def close(self) -> None:
        """Safe to call twice."""
        for line in self.keepers:
            line.close()
        self.memory.close()


class KeptSave:
    """One checkpoint; see the module.

    Args:
        lines: To the keepers.
        folder: A name that no other save has.
    """

    def __init__(self, lines: Lines, folder: str) -> None:
        self._lines = lines
        self._folder = folder
        self._file: KeptFile | None = None
        self._size_bytes = 0
        self.url = f"keeper://{folder}"

    @contextlib.contextmanager
    def room(self, size_bytes: int) -> Iterator[memoryview]:
        """Inside, memory for this rank's file, to be filled."""
        self._file, self._size_bytes = self._lines.memory.take(size_bytes), size_bytes
        with self._file.room(size_bytes) as view:
            yield view

    def hand_over(self, name: str) -> None:
        """Let the keeper of this host have it.

        Raises:
            StorageError: It cannot.
        """
        assert self._file is not None, "it has been filled"
        filled = self._lines.keepers[0].put(self._folder, name, self._file.descriptor, self._size_bytes)
        self._lines.used(filled.used_bytes)

    def spread(self, name: str) -> bool:
        """Send it to the buddy; whether that is there. If it fails, there is a warning."""
        buddy, file = self._lines.buddy, self._file
        if buddy is None or file is None:
            return True
        try:
            with file.room(self._size_bytes) as view:
                buddy.fill_in_parts(
                    self._folder, name, view, part_bytes=self._lines.part_bytes, pace=self._lines.rate.take
                )
        except StorageError as error:
            warnings.warn(f"a checkpoint is not kept on another host: {error}", stacklevel=2)
            return False
        return True

    def commit(self, files: Mapping[str, int], name: str, manifest: bytes, marker: bytes, *, is_alone: bool) -> bool:
        """On the coordinator, once all files are there.

        Args:
            files: Their names, and sizes in bytes.
            name: Of the manifest.
            manifest: Its bytes.
            marker: Those of the commit marker.
            is_alone: Drop what is older.

        Returns:
            Whether every keeper has it.

        Raises:
            StorageError: A file is not there, or no keeper answers.
        """
        told = self._tell(self._lines.keepers, name, manifest, lists=True)
        there: dict[str, int] = {}
        for filled in told.values():
            there.update(filled.files)
        missing = next((file for file, size in files.items() if there.get(file) != size), None)
        if missing is not None:
            raise StorageError(f"{self.url} lacks {missing}")
        committed = self._tell(list(told), MARKER_FILE, marker, alone=is_alone)
        return len(committed) == len(self._lines.keepers)

    def settle(self, *, is_committed: bool, is_alone: bool) -> None:
        """What has become of it.

        Args:
            is_committed: It is whole.
            is_alone: And no keeper has older ones.
        """
        if is_committed:
            self._lines.memory.committed(is_alone=is_alone)
        else:
            self._lines.memory.forget()

    def _tell(
        self, lines: Sequence[Line], name: str, data: bytes, *, alone: bool = False, lists: bool = False
    ) -> dict[Line, Filled]:
        """Write a small file to every keeper that answers, so that it outlives any of them."""
        told: dict[Line, Filled] = {}
        failure: NoKeeperError | None = None
        for line in lines:
            try:
                told[line] = line.fill(self._folder, name, data, alone=alone, lists=lists)
            except NoKeeperError as error:
                failure = error
        if not told and failure is not None:
            raise failure
        return told
