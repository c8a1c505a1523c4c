"""A rank's memory that a keeper of its host takes as it is: filled, handed over, and filled again once it was dropped.

Two pieces of it take turns: the keeper holds one, the rank fills the other.
"""

from __future__ import annotations

from lightning_dist.checkpoint.keeper.kept_file import KeptFile, room_for


class OwnMemory:
    """For one thread."""

    def __init__(self) -> None:
        self._free: list[KeptFile] = []
        self._filled: KeptFile | None = None  # by the save that is under way
        self._kept: KeptFile | None = None  # of the newest save that is whole

    def take(self, size_bytes: int) -> KeptFile:
        """Memory for the save that begins, of at least a size."""
        self.forget()
        file = self._free.pop() if self._free else KeptFile()
        if file.is_mapped and file.room_bytes > 2 * room_for(size_bytes):
            file.close()
            file = KeptFile()
        self._filled = file
        return file

    def committed(self, *, is_alone: bool) -> None:
        """The save is whole.

        Args:
            is_alone: No keeper holds older ones any more, so what they took may be filled again.
        """
        before, self._kept, self._filled = self._kept, self._filled, None
        if before is not None and is_alone:
            self._free.append(before)
        elif before is not None:
            before.close()

    def forget(self) -> None:
        """The save has failed, or how it ended is not known: a keeper may hold what was filled."""
        filled, self._filled = self._filled, None
        if filled is not None:
            filled.close()

    def close(self) -> None:
        """Let go of all; keepers go on holding what they have. Safe to call twice."""
        self.forget()
        self.committed(is_alone=True)
        free, self._free = self._free, []
        for file in free:
            file.close()
