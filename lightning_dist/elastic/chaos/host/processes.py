"""Processes of this host: which one it is, whether it lives, who its children are, who listens on a port."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_LISTENS = "0A"  # state of a socket in /proc/net/tcp


@dataclass(frozen=True)
class Process:
    """A process, told from a later one with the same number.

    Attributes:
        pid: Its number.
        started: Clock ticks from the machine's start to its own.
    """

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The one that has the number now; ``None``: nobody has, or it has ended and waits for its parent."""
        fields = _fields(pid)
        return None if fields is None or fields[0] in "ZX" else cls(pid, int(fields[19]))

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return Process.of(self.pid) == self

    def send(self, number: signal.Signals) -> bool:
        """A signal; whether it was there to get it."""
        if not self.is_alive():
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False


def this_process() -> Process:
    """The caller's."""
    process = Process.of(os.getpid())
    assert process is not None, "it runs"
    return process


def descendants(pid: int) -> list[Process]:
    """All that come from a process and whose parents live, itself not."""
    children: dict[int, list[int]] = {}
    for other in _pids():
        fields = _fields(other)
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(other)
    found, rest = [], list(children.get(pid, ()))
    while rest:
        each = rest.pop()
        rest += children.get(each, ())
        process = Process.of(each)
        if process is not None:
            found.append(process)
    return found


def with_variable(name: str, value: str) -> list[Process]:
    """Those that were started, or forked from one that was, with an environment variable of a value."""
    wanted = f"{name}={value}".encode()
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):
            if wanted in (_PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                process = Process.of(pid)
                if process is not None and pid != os.getpid():
                    found.append(process)
    return found


def kill_all(processes: Iterable[Process]) -> None:
    """SIGKILL to all; those that are stopped too."""
    for process in processes:
        process.send(signal.SIGKILL)


def command_of(process: Process) -> str:
    """Its command line, for people."""
    try:
        words = (_PROC / str(process.pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return f"process {process.pid}"
    return " ".join(word.decode(errors="replace") for word in words if word)[:160]


def is_own_address(address: str) -> bool:
    """Whether this host has an address, by name or number."""
    try:
        entries = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, where in entries:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind((where[0], 0))
            return True
    return False


def listener(port: int) -> Process | None:
    """Who listens on a TCP port of this network namespace, as far as one may see; ``None``: nobody."""
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not inodes:
        return None
    return next((process for pid in _pids() if _holds(pid, inodes) and (process := Process.of(pid))), None)


def _holds(pid: int, inodes: set[str]) -> bool:
    """Whether a process has one of the files open, as far as one may see."""
    with contextlib.suppress(OSError):
        folder = _PROC / str(pid) / "fd"
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                if os.readlink(folder / name) in inodes:
                    return True
    return False


def _listening_inodes(port: int) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "thread-self" / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdigit()]


def _fields(pid: int) -> list[str] | None:
    """Of ``/proc/PID/stat``, from the state on: what comes before may hold spaces."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
