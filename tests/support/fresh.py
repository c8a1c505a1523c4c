"""Fresh processes, for tests that kill or stop ranks, or that run a script as a user does.

Usage::

    result = run_script(["examples/train.py", "trainer.max_steps=2"], deadline_s=60)
    result.check()                       # raises with the output, unless it exited with 0 and left no process

    with FreshRanks.local([script], placement={"a": [0, 1]}) as ranks:
        ranks.wait_for_output(0, "step 3", deadline_s=30)
        ranks.kill(1)
        results = ranks.wait(deadline_s=10)

Every process started, and every process these start, is dead when the ``with`` ends, whatever happened.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import psutil

from tests.support import tied
from tests.support.failures import RankFailure, RanksFailed
from tests.support.placement import HostRanks, Placement
from tests.support.processes import (
    RUN_VARIABLE,
    as_command,
    clean_environment,
    descendants,
    describe,
    free_port,
    is_alive,
    kill_all,
    marked_processes,
)

Argv: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
STACKS_GRACE_S = 3.0

_numbers = itertools.count()


@dataclass(frozen=True)
class Command:
    """A process to start.

    Attributes:
        argv: Command line; a script ``x.py``, ``-m`` and ``-c`` run under this Python.
        environment: Changes to a clean environment.
        netns: Network namespace it runs in.
        cwd: Working directory; by default a new folder of its own.
    """

    argv: Argv
    environment: Mapping[str, str] = field(default_factory=dict)
    netns: str | None = None
    cwd: Path | None = None


@dataclass(frozen=True)
class FreshResult:
    """How a process ended.

    Attributes:
        rank: Index among the processes started together.
        returncode: Exit code (negative: the signal that ended it).
        stdout: What it printed; its children too.
        stderr: Likewise.
        duration_s: From start to end, in seconds.
        survivors: Processes that were left when all had ended, a line each.
    """

    rank: int
    returncode: int
    stdout: str
    stderr: str
    duration_s: float
    survivors: tuple[str, ...] = ()

    @property
    def output(self) -> str:
        """Standard output, then standard error."""
        return self.stdout + self.stderr

    def check(self) -> FreshResult:
        """Itself, if it exited with 0 and left no process.

        Raises:
            RanksFailed: Otherwise, with its output.
        """
        if self.returncode != 0:
            failure = RankFailure(self.rank, "died", _ending(self.returncode), output=self.output)
            raise RanksFailed("fresh process", [failure])
        if self.survivors:
            raise RanksFailed(
                "fresh process", [RankFailure(self.rank, "leaked", "left processes", "\n".join(self.survivors))]
            )
        return self


@dataclass(eq=False)
class _Fresh:
    process: subprocess.Popen[bytes]
    pidfd: int
    stdout: Path
    stderr: Path
    started_s: float
    ended_s: float | None = None


class FreshRanks:
    """Processes started together and watched together.

    Args:
        commands: What to start, by rank.

    The processes die with the thread that started them, each has a session of its own, and all carry a mark in their
    environment by which they and their descendants are found.
    """

    def __init__(self, commands: Iterable[Command]) -> None:
        self.run = f"{os.getpid()}-fresh-{next(_numbers)}"
        self.tmp_path = Path(tempfile.mkdtemp(prefix="fresh-"))
        self._ranks: list[_Fresh] = []
        try:
            for command in commands:
                self._ranks.append(self._start(len(self._ranks), command))
        except BaseException:
            self.close()
            raise

    @classmethod
    def local(
        cls,
        argv: Argv,
        *,
        world_size: int | None = None,
        placement: Placement | HostRanks | None = None,
        env: Mapping[str, str] | None = None,
        env_per_rank: Sequence[Mapping[str, str]] | None = None,
        cwd: Path | None = None,
    ) -> FreshRanks:
        """One process a rank on this machine, with the variables a launcher would set and hosts as labels."""
        given = placement if placement is not None else world_size
        if given is None:
            raise ValueError("give world_size=N or placement={host: [ranks]}")
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        commands = []
        for seat in Placement.of(given).seats():
            own = env_per_rank[seat.rank] if env_per_rank is not None else {}
            environment = {**common, **seat.environment(), "HIERDIST_HOST": seat.host, **(env or {}), **own}
            commands.append(Command(argv, environment, cwd=cwd))
        return cls(commands)

    def __enter__(self) -> FreshRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [rank.process.pid for rank in self._ranks]

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Send a rank a signal; its children get none."""
        self._ranks[rank].process.send_signal(signum)

    def stop(self, rank: int) -> None:
        """Freeze a rank (SIGSTOP)."""
        self.kill(rank, signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        """Let a frozen rank go on."""
        self.kill(rank, signal.SIGCONT)

    def output(self, rank: int) -> str:
        """What a rank has printed by now, standard output then standard error."""
        return _read(self._ranks[rank].stdout) + _read(self._ranks[rank].stderr)

    def wait_for_output(self, rank: int, text: str, *, deadline_s: float) -> str:
        """Wait until a rank has printed ``text``; all it has printed by then.

        Raises:
            RanksFailed: It ended, or the deadline passed, before that.
        """
        end = time.monotonic() + deadline_s
        while True:
            ended = self._ranks[rank].process.poll() is not None
            printed = self.output(rank)
            if text in printed:
                return printed
            if ended:
                code = self._ranks[rank].process.returncode
                failure = RankFailure(rank, "died", f"{_ending(code)} before it printed {text!r}", output=printed)
                raise RanksFailed("fresh ranks", [failure])
            if time.monotonic() > end:
                self._raise_hung([rank], f"did not print {text!r} within {deadline_s:g} s")
            time.sleep(0.01)

    def wait(self, *, deadline_s: float, ranks: Iterable[int] | None = None) -> list[FreshResult]:
        """Wait until the ranks (all, if none are named) have ended; their results.

        Raises:
            RanksFailed: Some have not by the deadline; shows the stacks of their Python threads.
        """
        wanted = list(range(len(self._ranks)) if ranks is None else ranks)
        end = time.monotonic() + deadline_s
        pending: dict[Any, int] = {self._ranks[r].pidfd: r for r in wanted if not self._has_ended(r)}
        while pending:
            ready = wait(list(pending), timeout=max(0.0, end - time.monotonic()))
            for pidfd in ready:
                self._has_ended(pending.pop(pidfd))
            if not ready:
                self._raise_hung(sorted(pending.values()), f"did not end within {deadline_s:g} s")
        return [self._result(rank) for rank in wanted]

    def survivors(self, *, within_s: float = 0.0) -> list[str]:
        """The processes that are left although the rank they belong to has ended, after up to ``within_s`` seconds."""
        end = time.monotonic() + within_s
        while True:
            own = {rank.process.pid for rank in self._ranks if rank.process.poll() is None}
            living = [p for p in marked_processes(RUN_VARIABLE, self.run) if p.pid not in own]
            if own:
                family = {process.pid for process in descendants(own)}
                living = [process for process in living if process.pid not in family]
            if not living or time.monotonic() >= end:
                return [describe(process) for process in living]
            time.sleep(0.01)

    def close(self) -> None:
        """Kill everything that is left. Safe twice."""
        try:
            kill_all((r.process.pid for r in self._ranks if r.process.poll() is None), run=self.run)
        finally:
            for rank in self._ranks:
                rank.process.wait()
                if rank.pidfd >= 0:
                    os.close(rank.pidfd)
                    rank.pidfd = -1
            shutil.rmtree(self.tmp_path, ignore_errors=True)

    def _start(self, number: int, command: Command) -> _Fresh:
        folder = self.tmp_path / str(number)
        cwd = command.cwd if command.cwd is not None else folder / "cwd"
        folder.mkdir()
        cwd.mkdir(exist_ok=True)
        argv = [sys.executable, "-I", "-S", str(tied.__file__), str(os.getpid()), command.netns or "-"]
        stdout, stderr = folder / "stdout", folder / "stderr"
        started_s = time.monotonic()
        with open(stdout, "wb") as out, open(stderr, "wb") as err:
            process = subprocess.Popen(
                [*argv, *as_command(command.argv)],
                cwd=cwd,
                env={**clean_environment(command.environment), RUN_VARIABLE: self.run},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        return _Fresh(process, os.pidfd_open(process.pid), stdout, stderr, started_s)

    def _has_ended(self, rank: int) -> bool:
        fresh = self._ranks[rank]
        if fresh.process.poll() is None:
            return False
        if fresh.ended_s is None:
            fresh.ended_s = time.monotonic()
        return True

    def _result(self, rank: int, survivors: Iterable[str] = ()) -> FreshResult:
        fresh = self._ranks[rank]
        duration_s = (fresh.ended_s or time.monotonic()) - fresh.started_s
        return FreshResult(
            rank, fresh.process.returncode, _read(fresh.stdout), _read(fresh.stderr), duration_s, tuple(survivors)
        )

    def _raise_hung(self, ranks: Sequence[int], summary: str) -> None:
        stuck = descendants(self._ranks[rank].process.pid for rank in ranks)
        for process in stuck:  # Python's fault handler prints all threads' stacks to standard error
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGABRT)
                process.send_signal(signal.SIGCONT)
        end = time.monotonic() + STACKS_GRACE_S
        while any(is_alive(process) for process in stuck) and time.monotonic() < end:
            time.sleep(0.01)
        failures = [RankFailure(rank, "hung", summary, output=self.output(rank)) for rank in ranks]
        others = [rank for rank in range(len(self._ranks)) if rank not in ranks and self._has_ended(rank)]
        for rank in others:
            code = self._ranks[rank].process.returncode
            if code != 0:
                failures.insert(0, RankFailure(rank, "died", _ending(code), output=self.output(rank)))
        raise RanksFailed("fresh ranks", failures)


def run_script(
    argv: Argv,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    deadline_s: float = 60.0,
    settle_s: float = 5.0,
) -> FreshResult:
    """Run one command as a user does (no launcher variables) and wait for it.

    Args:
        argv: Command line, see :class:`Command`.
        env: Changes to a clean environment.
        cwd: Working directory; by default a new folder that is removed.
        deadline_s: Time it has, in seconds.
        settle_s: Time its children have to end after it, in seconds; those left are in ``survivors``.

    Raises:
        RanksFailed: It did not end by the deadline.
    """
    with FreshRanks([Command(argv, env or {}, cwd=cwd)]) as ranks:
        ranks.wait(deadline_s=deadline_s)
        return ranks._result(0, ranks.survivors(within_s=settle_s))


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _read(path: Path) -> str:
    with open(path, errors="replace") as file:
        return file.read()
