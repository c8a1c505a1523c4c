"""The agent's private folder, which it shares with the ranks of its host: board, options, last words.

Note [whose folder]
    An agent holds a lock in its folder as long as it lives, and the kernel gives it up with the agent, however that
    ends. The lock's file has its name only once it is locked. So who gets the lock has found a folder that nobody uses
    any more: that of an agent that was killed together with its template, which else would have removed it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from lightning_dist.elastic.agent.environment import words_file
from lightning_dist.elastic.agent.staying import next_file
from lightning_dist.elastic.detect.board import FILE, Board

_PREFIX = "hierdist-agent-"
_LOCK = "lock"


class AgentFolder:
    """A folder that only this user may read, from the start to the end of a ``with`` statement; there in all rounds.

    Args:
        num_ranks: Of this host.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock: int | None = _locked(self.path)  # see Note [whose folder]
        self.board = Board.create(self.path / FILE, num_ranks)

    def __enter__(self) -> AgentFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin_round(self) -> Board:
        """Make an empty board, and forget what ranks of the last round have said, and what was said to them."""
        for local_rank in range(self._num_ranks):
            words_file(self.path, local_rank).unlink(missing_ok=True)
            next_file(self.path, local_rank).unlink(missing_ok=True)
        former = self.board
        self.board = Board.create(self.path / FILE, self._num_ranks)
        self.board.count_timeouts(former.timeouts)
        former.close()
        return self.board

    def close(self) -> None:
        """Remove it. Safe to call twice."""
        self.board.close()
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def remove_abandoned() -> list[Path]:
    """Remove the folders of this user's agents on this host that were killed; which they were."""
    return [path for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*") if _remove_if_abandoned(path)]


def _locked(folder: Path) -> int:
    """See Note [whose folder]; the descriptor holds the lock."""
    fresh = folder / f".{_LOCK}"
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with suppress(OSError):  # a file system without locks: nobody else gets one, either
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fresh.rename(folder / _LOCK)
    return descriptor


def _remove_if_abandoned(folder: Path) -> bool:
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return False
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # one of another release, one that begins or ends just now, or nobody's
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        shutil.rmtree(folder, ignore_errors=True)
        return True
    finally:
        os.close(descriptor)
