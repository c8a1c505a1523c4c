"""The server processes of a host: started by its first rank, watched, and started again where rows have a copy.

The sockets on which they listen are opened here and handed down, so that they outlive a process: who connects while it
is started again waits, and finds it where it was. A process that cannot come back has its sockets closed, which ends
that waiting at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from lightning_dist.errors import LaunchError
from lightning_dist.gradsync.parameter_server.processes.homes import Home
from lightning_dist.gradsync.parameter_server.processes.task import Task
from lightning_dist.parent_watch import bound_command

_PROGRAM = Path(__file__).with_name("__main__.py")
_END_S = 5.0
_READY = b"ready\n"


@dataclass(frozen=True)
class Death:
    """A server process has ended by itself.

    Attributes:
        home: Which.
        how: In words.
        restarts: Whether it is started again.
        has_copy: Whether there is, or was, a second copy of its rows.
    """

    home: Home
    how: str
    restarts: bool
    has_copy: bool


@dataclass(frozen=True)
class Return:
    """A server process serves again.

    Attributes:
        home: Which.
        seconds: Since it was found to have ended.
    """

    home: Home
    seconds: float


Told = Callable[["Death | Return"], None]


class ServerProcess:
    """One process, as long as its rank wants it.

    Args:
        home: Its name.
        task: What it holds.
        listeners: The sockets that the task names; closed at the end.
        told: Is told of its ends and returns; by a thread of its own.
    """

    def __init__(self, home: Home, task: Task, listeners: Sequence[socket.socket], *, told: Told) -> None:
        self._home = home
        self._task = task
        self._listeners = tuple(listeners)
        self._told = told
        self._has_copies = all(share.elsewhere is not None for share in task.shares)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._process = self._start(task)
        self._thread = threading.Thread(target=self._watch, name="hierdist-rows-watch", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Of the present process."""
        return self._process.pid

    def close(self) -> None:
        """End it, and wait for its end. Safe to call twice."""
        with self._lock:
            self._closing.set()
            process = self._process
        with contextlib.suppress(OSError):
            _input_of(process).close()  # which ends it
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._thread.join()
        self._close_listeners()

    def _start(self, task: Task) -> subprocess.Popen[bytes]:
        descriptors = [listener.fileno() for listener in self._listeners]
        process = subprocess.Popen(
            bound_command([sys.executable, str(_PROGRAM)]),
            env=_environment(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=descriptors,
        )
        with contextlib.suppress(BrokenPipeError):  # it has ended, which is seen in a moment
            to_child = _input_of(process)
            to_child.write(task.to_json().encode() + b"\n")
            to_child.flush()
        return process

    def _watch(self) -> None:
        """Wait for the end of one process after the other; this thread has started all but the first."""
        lost_s: float | None = None
        while True:
            process = self._process
            assert process.stdout is not None, "it is a pipe"
            has_served = process.stdout.readline() == _READY
            if has_served and lost_s is not None:
                self._told(Return(self._home, time.monotonic() - lost_s))
            process.wait()
            process.stdout.close()
            lost_s = time.monotonic()
            with contextlib.suppress(OSError):
                _input_of(process).close()
            with self._lock:
                if self._closing.is_set():
                    return
                restarts = has_served and self._has_copies
                self._told(Death(self._home, _how(process.returncode), restarts, self._has_copies))
                if not restarts:
                    self._close_listeners()
                    return
                self._process = self._start(replace(self._task, restores=True))

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # who waits to be accepted learns of it
            listener.close()


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Without what makes a process a rank, and without secrets."""
    return {name: value for name, value in environ.items() if not name.startswith("HIERDIST_")}


def _input_of(process: subprocess.Popen[bytes]) -> IO[bytes]:
    if process.stdin is None:
        raise LaunchError("a server process was started without a pipe")
    return process.stdin


def _how(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
