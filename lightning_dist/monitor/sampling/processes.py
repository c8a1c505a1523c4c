"""Which processes belong to a rank: itself and what it has started, e.g. readers of data; but no other rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

PROC = Path("/proc")
_LOCAL_RANK = b"LOCAL_RANK="


class RankProcesses:
    """The processes that a rank has started, and those that they have.

    The process that was started first starts the other ranks where Lightning launches them: these are told by the
    ``LOCAL_RANK`` that they were given.

    Args:
        pid: The rank's.
        environ: The rank's variables, as they are now.
        proc: Where the kernel's files are.
    """

    def __init__(
        self,
        pid: int | None = None,
        *,
        environ: Callable[[], Mapping[str, str]] = lambda: os.environ,
        proc: Path = PROC,
    ) -> None:
        self.pid = os.getpid() if pid is None else pid
        self._environ = environ
        self._proc = proc
        self._is_other_rank: dict[int, bool] = {}

    def started(self) -> list[int]:
        """Those that live now."""
        seen: set[int] = set()
        found = list(self._below(self.pid, seen))
        for pid in set(self._is_other_rank) - seen:
            del self._is_other_rank[pid]  # its number may be given to another
        return found

    def _below(self, pid: int, seen: set[int]) -> Iterator[int]:
        for child in self._children(pid):
            seen.add(child)
            if child not in self._is_other_rank:
                self._is_other_rank[child] = self._tell(child)
            if not self._is_other_rank[child]:
                yield child
                yield from self._below(child, seen)

    def _children(self, pid: int) -> list[int]:
        found: list[int] = []
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(self._proc / str(pid) / "task"):
                with contextlib.suppress(OSError):
                    found += map(int, content(f"{self._proc}/{pid}/task/{thread}/children").split())
        return found

    def _tell(self, pid: int) -> bool:
        try:
            variables = content(f"{self._proc}/{pid}/environ")
            if variables == content(f"{self._proc}/{self.pid}/environ"):
                return False  # a copy of the rank, by fork
        except OSError:
            return False
        given = next((each for each in variables.split(b"\0") if each.startswith(_LOCAL_RANK)), None)
        own = self._environ().get("LOCAL_RANK", "0")
        return given is not None and given.removeprefix(_LOCAL_RANK).decode(errors="replace") != own


def content(path: str) -> bytes:
    """A file of ``/proc``; several times as quick as ``Path.read_bytes``, for what is read once a process.

    Raises:
        OSError: It is not there.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)
