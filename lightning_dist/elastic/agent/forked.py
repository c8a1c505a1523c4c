"""A child process that was forked, with the part of :class:`subprocess.Popen` that is needed of it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from typing import Protocol


class Process(Protocol):
    """A child process."""

    @property
    def returncode(self) -> int | None:
        """Exit code, or the signal that ended it, negative; ``None``: it has not been waited for."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, at most so many seconds."""


class Forked:
    """A child of this process.

    Args:
        pid: Its process id.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._returncode: int | None = None

    @property
    def returncode(self) -> int | None:
        """Exit code, or the signal that ended it, negative; ``None``: it has not been waited for."""
        return self._returncode

    def kill(self) -> None:
        """Send SIGKILL, unless it has been waited for."""
        if self._returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Args:
            timeout: At most so many seconds.

        Raises:
            subprocess.TimeoutExpired: It has not ended by then.
        """
        if self._returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            _, status = os.waitpid(self._pid, 0)
            os.close(self._pidfd)
            self._returncode = os.waitstatus_to_exitcode(status)
        return self._returncode
