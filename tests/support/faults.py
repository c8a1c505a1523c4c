"""Faults that strike by plan: on one rank, at the n-th call of one operation, in one way.

Usage, on the ranks of a pool::

    plan = FaultPlan([Fault(rank=3, kind="kill", operation="all_reduce", group="cross", nth=2)])

    def body(context, plan):
        point = plan.point(context.rank, context.tmp_path)
        run = build.open_run(..., fault_point=point)       # strikes where the seam says so
        point("step", "main", context.rank)                # and where the test says so

A strike leaves its time (monotonic clock, one for all processes of the machine) and the process id, so that survivors
can say how long they took, and can end a process that stopped itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.support.processes import pid_lives

Kind = Literal["kill", "stop", "pause", "raise"]


class InjectedError(RuntimeError):
    """What ``kind="raise"`` raises."""


@dataclass(frozen=True)
class Fault:
    """One strike.

    Attributes:
        rank: Whom it hits.
        kind: ``kill`` (SIGKILL to itself), ``stop`` (SIGSTOP to itself, for good), ``pause`` (SIGSTOP, and SIGCONT
            after ``pause_s``), ``raise`` (:class:`InjectedError`).
        operation: Name of the operation at the seam, e.g. ``"all_reduce"``.
        group: Label of the operation's group, e.g. ``"cross"``; any, if empty.
        nth: Which call of it on that rank, from 1.
        pause_s: Length of a pause, in seconds.
    """

    rank: int
    kind: Kind
    operation: str
    group: str = ""
    nth: int = 1
    pause_s: float = 1.0

    def __str__(self) -> str:
        return f"{self.kind} rank {self.rank} at {self.operation} {self.nth} on {self.group or 'any'}"


@dataclass(frozen=True)
class Strike:
    """That a fault struck.

    Attributes:
        rank: Whom.
        pid: Its process.
        at_s: When, on the monotonic clock.
    """

    rank: int
    pid: int
    at_s: float


class FaultPlan:
    """Faults, each of which strikes once."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)

    def point(self, rank: int, folder: Path) -> FaultPoint:
        """The fault point of one rank; strikes are written down in ``folder``."""
        return FaultPoint([fault for fault in self.faults if fault.rank == rank], folder)


class FaultPoint:
    """Counts calls by (operation, group) and strikes when a fault's turn has come. Any thread may call it."""

    def __init__(self, faults: Sequence[Fault], folder: Path) -> None:
        self._faults = list(faults)
        self._folder = folder
        self._calls: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def __call__(self, operation: str, group: str, rank: int) -> None:
        with self._lock:
            for key in ((operation, group), (operation, "")):
                self._calls[key] += 1
            due = [
                f for f in self._faults if self._calls[operation, f.group] == f.nth and self._is_at(f, operation, group)
            ]
            self._faults = [fault for fault in self._faults if fault not in due]
        for fault in due:
            self._strike(fault)

    @staticmethod
    def _is_at(fault: Fault, operation: str, group: str) -> bool:
        return fault.operation == operation and fault.group in ("", group)

    def _strike(self, fault: Fault) -> None:
        note = json.dumps([fault.rank, os.getpid(), time.monotonic()])
        part = self._folder / f"strike-{fault.rank}.part"
        part.write_text(note)
        part.rename(self._folder / f"strike-{fault.rank}")
        if fault.kind == "raise":
            raise InjectedError(str(fault))
        if fault.kind == "pause":
            subprocess.Popen(["sh", "-c", f"sleep {fault.pause_s}; kill -CONT {os.getpid()}"])
        signal.raise_signal(signal.SIGKILL) if fault.kind == "kill" else os.kill(os.getpid(), signal.SIGSTOP)


def strikes(folder: Path) -> list[Strike]:
    """What has struck by now."""
    found = [Strike(*json.loads(p.read_text())) for p in folder.glob("strike-*") if p.suffix != ".part"]
    return sorted(found, key=lambda strike: strike.at_s)


def wait_for_end(pid: int, *, deadline_s: float) -> None:
    """Wait until a process is gone.

    Raises:
        TimeoutError: It is not, by the deadline.
    """
    end = time.monotonic() + deadline_s
    while pid_lives(pid):
        if time.monotonic() > end:
            raise TimeoutError(f"process {pid} still lives after {deadline_s:g} s")
        time.sleep(0.01)


def end_stopped(folder: Path, *, rank: int, survivors: Sequence[int], deadline_s: float) -> None:
    """Called by each survivor when it is done: the last to come ends the processes that stopped themselves.

    Args:
        folder: Where strikes are written down, shared by the ranks.
        rank: Who calls.
        survivors: Who will call.
        deadline_s: How long the first survivor waits for the others, in seconds.
    """
    (folder / f"done-{rank}").touch()
    if rank != min(survivors):
        return
    end = time.monotonic() + deadline_s
    while not all((folder / f"done-{other}").exists() for other in survivors) and time.monotonic() < end:
        time.sleep(0.01)
    for strike in strikes(folder):
        if strike.rank not in survivors:
            try:
                os.kill(strike.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
