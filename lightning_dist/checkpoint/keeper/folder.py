"""Files of keepers as a folder: written to the keeper of this host, read from whichever has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from lightning_dist.checkpoint.keeper.client import Keeper
from lightning_dist.checkpoint.keeper.messages import NoKeeperError
from lightning_dist.errors import StorageError

_T = TypeVar("_T")


class KeptFolder:
    """See :class:`lightning_dist.checkpoint.storage.Folder`.

    A keeper that does not answer is taken for one that has nothing, unless none answers.

    Args:
        keepers: The first is written to, all are read.
        path: Of the folder; empty for the one that holds all others, which holds no files.
    """

    def __init__(self, keepers: Sequence[Keeper], path: str = "") -> None:
        self._keepers = tuple(keepers)
        self._path = path
        self.url = f"keeper://{path}"

    def child(self, name: str) -> KeptFolder:
        """See ``Folder``."""
        return KeptFolder(self._keepers, f"{self._path}/{name}" if self._path else name)

    def write(self, name: str, buffers: Iterable[bytes | bytearray | memoryview]) -> None:
        """See ``Folder``; it survives this process, not a power cut."""
        self._keepers[0].write(self._path, name, buffers)

    def write_everywhere(self, name: str, buffers: Iterable[bytes | bytearray | memoryview]) -> None:
        """Write a small file to every keeper that answers, so that it outlives any of them."""
        self._answers(lambda keeper: keeper.write(self._path, name, buffers))

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        """See ``Folder``."""

        def read(keeper: Keeper) -> int | None:
            return keeper.read_into(self._path, name, start, target)

        size = self._first(read)
        if size is None:
            missing = FileNotFoundError(name)
            raise StorageError(f"cannot read {self.url}/{name}: no keeper has it") from missing
        if size != len(target):
            short = EOFError(f"it ends at byte {start + size}, {start + len(target)} were expected")
            raise StorageError(f"cannot read {self.url}/{name}: {short}") from short

    def read(self, name: str) -> bytes | None:
        """See ``Folder``."""
        return self._first(lambda keeper: keeper.read(self._path, name))

    def list(self) -> dict[str, int | None]:
        """See ``Folder``."""
        found: dict[str, int | None] = {}
        prefix = f"{self._path}/" if self._path else ""
        for folders, files in self._answers(lambda keeper: (keeper.folders(), keeper.list(self._path))):
            for folder in folders:
                if folder.startswith(prefix) and folder != self._path:
                    found[folder.removeprefix(prefix).partition("/")[0]] = None
            found.update(files)
        return found

    def remove(self, name: str) -> None:
        """See ``Folder``; of every keeper."""
        self._answers(lambda keeper: keeper.remove(self._path, name))

    def forget_all(self) -> None:
        """Drop all folders of every keeper."""
        self._answers(lambda keeper: keeper.keep(None))

    def _first(self, ask: Callable[[Keeper], _T | None]) -> _T | None:
        failure: NoKeeperError | None = None
        answered = False
        for keeper in self._keepers:
            try:
                found = ask(keeper)
            except NoKeeperError as error:
                failure = error
                continue
            answered = True
            if found is not None:
                return found
        if not answered and failure is not None:
            raise failure
        return None

    def _answers(self, ask: Callable[[Keeper], _T]) -> Sequence[_T]:
        answers = []
        failure: NoKeeperError | None = None
        for keeper in self._keepers:
            try:
                answers.append(ask(keeper))
            except NoKeeperError as error:
                failure = error
        if not answers and failure is not None:
            raise failure
        return answers
