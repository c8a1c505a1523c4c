"""Locks between the processes and threads of a host, by ``flock``: the kernel releases those of the dead.

A lock is a file that says who holds it. The holder removes the file when it lets go, unless the file is to stay; who
gets a lock on a file that is no longer at its path has got nothing, and tries again.

Note: forks. A forked child inherits the descriptors of its parent, and would keep a lock of a parent that dies. So
children close what their parent had locked, which does not release it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from lightning_dist.errors import DataCacheError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02

_opening = threading.Lock()  # held over a fork, so that no descriptor is inherited before it is listed
_open: set[int] = set()


class Holder(NamedTuple):
    """Who holds a lock.

    Attributes:
        pid: Process.
        since_s: Seconds since 1970.
    """

    pid: int
    since_s: float

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since_s, tz=timezone.utc).astimezone()
        return f"process {self.pid}{' (this one)' if self.pid == os.getpid() else ''} since {since:%H:%M:%S}"


class HostLock:
    """A lock of a path; held by one thread of one process at a time.

    Args:
        path: In a folder that is ours alone.
        stays: Leave the file there when it is released.
    """

    def __init__(self, path: Path, *, stays: bool = False) -> None:
        self.path = path
        self._stays = stays
        self._descriptor = -1

    def try_acquire(self) -> bool:
        """Get it if it is free.

        Raises:
            OSError: The file cannot be made.
        """
        while True:
            descriptor = _open_listed(self.path)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _close_listed(descriptor)
                return False
            except BaseException:  # a file system without locks
                _close_listed(descriptor)
                raise
            if _is_at(self.path, descriptor):
                self._descriptor = descriptor
                with contextlib.suppress(OSError):  # a full disk: nobody will know who holds it
                    # Always as long, as ext4 writes a file that was cut to disk when it is closed: a millisecond.
                    os.pwrite(descriptor, f"{os.getpid():20d} {time.time():20.3f}\n".encode(), 0)
                return True
            _close_listed(descriptor)

    def release(self) -> None:
        """Let go; safe to call twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        if not self._stays:
            with contextlib.suppress(OSError):
                self.path.unlink()
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        _close_listed(descriptor)

    def holder(self) -> Holder | None:
        """Who has it now; ``None`` if nobody has, or has not said so yet."""
        try:
            pid, since_s = self.path.read_text().split()
            return Holder(int(pid), float(since_s))
        except (OSError, ValueError):
            return None


@contextlib.contextmanager
def held(path: Path, *, wait_s: float) -> Iterator[None]:
    """Hold a lock whose file stays, for a moment.

    Args:
        path: Of the lock.
        wait_s: How long another may have it, in seconds.

    Raises:
        DataCacheError: It was not released in time; names who holds it.
    """
    lock, end, pause_s = HostLock(path, stays=True), time.monotonic() + wait_s, _FIRST_PAUSE_S
    while not lock.try_acquire():
        if time.monotonic() > end:
            raise DataCacheError(
                f"{path} has been locked for {wait_s:g} s by {lock.holder() or 'an unknown process'}, which should "
                "hold it for a moment; is it stopped? Continue or end it"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    try:
        yield
    finally:
        lock.release()


def _open_listed(path: Path) -> int:
    with _opening:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _open.add(descriptor)
    return descriptor


def _close_listed(descriptor: int) -> None:
    with _opening:
        _open.discard(descriptor)
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))


def _forget_in_child() -> None:
    for descriptor in _open:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _open.clear()
    _opening.release()


os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_forget_in_child)
