"""The test process's side of the fork server: ask for a rank, get a process with a pipe to it."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.support.leaks import Exempt
from tests.support.processes import REPO_ROOT, clean_environment, kill_all, pid_lives

PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "lightning.pytorch",
    "pytest",
    "lightning_dist",
)
START_DEADLINE_S = 90.0
STACKS_DEADLINE_S = 2.0
BEFORE_BYTES = 2000


@dataclass(eq=False)
class RankProcess:
    """A ready rank.

    Attributes:
        pid: Its process id.
        connection: Tasks go in, outcomes come out.
        netns: The network namespace it lives in.
        run: Mark that its descendants carry in their environment.
        output: File that has all it printed.
        stacks: File into which it writes its threads' stacks on SIGUSR1.
        output_start: Where the output of the present call starts in ``output``.
    """

    pid: int
    connection: Connection
    netns: str | None
    run: str
    output: Path
    stacks: Path
    output_start: int = 0

    def printed(self) -> str:
        """What it printed during the present call; or the end of what it printed before, if it died before."""
        with open(self.output, errors="replace") as file:
            file.seek(self.output_start)
            printed = file.read()
            if not printed and self.output_start and not pid_lives(self.pid):
                file.seek(max(0, self.output_start - BEFORE_BYTES))
                return f"nothing in this call; before it:\n{file.read()}"
            return printed

    def dump_stacks(self) -> str:
        """Where each of its threads is; also of a stopped process, which runs on for that."""
        stopped = ""
        with contextlib.suppress(psutil.Error):
            stopped = "(it was stopped)\n" if psutil.Process(self.pid).status() == psutil.STATUS_STOPPED else ""
        with contextlib.suppress(ProcessLookupError):
            # To the main thread, which then answers before it runs on; another thread might answer after it has.
            ctypes.CDLL(None).tgkill(self.pid, self.pid, int(signal.SIGUSR1))
            os.kill(self.pid, signal.SIGCONT)
        end, size = time.monotonic() + STACKS_DEADLINE_S, 0
        while time.monotonic() < end:
            time.sleep(0.02)
            now = self.stacks.stat().st_size
            if now and now == size:
                break
            size = now
        return stopped + (self.stacks.read_text() or "(no stacks: the process did not answer)")


class ForkServer:
    """A process that has imported torch, Lightning and the library, and forks ready ranks.

    Args:
        preload: Modules it imports.

    Start it in a thread that lives as long as it: the kernel ends it with that thread.
    """

    def __init__(self, preload: Sequence[str] = PRELOADED) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._preload = tuple(preload)
        self._numbers = itertools.count()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def exempt(self) -> Exempt:
        """What in this process belongs to the server; for leak checks."""
        if self._process is None or self._control is None:
            return Exempt()
        return Exempt([self._process.pid], [self._control.fileno()])

    def fork(self, *, netns: str | None = None, environment: dict[str, str] | None = None) -> RankProcess:
        """A new ready rank, in a network namespace if one is named."""
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        output, stacks = self._folder / f"{number}.out", self._folder / f"{number}.stacks"
        output.touch()
        stacks.touch()
        run = f"{os.getpid()}-{id(self)}-{number}"
        request = {
            "verb": "fork",
            "netns": netns,
            "output": str(output),
            "stacks": str(stacks),
            "run": run,
            "environment": environment or {},
        }
        try:
            pid = self._ask(request, theirs.fileno(), timeout_s=START_DEADLINE_S)
            assert isinstance(pid, int)
            return RankProcess(pid, Connection(ours.detach()), netns, run, output, stacks)
        finally:
            ours.close()
            theirs.close()

    def status(self, rank: RankProcess, *, timeout_s: float = 5.0) -> int | None:
        """Exit code of a rank (negative: the signal that ended it), or ``None`` if it lives on."""
        status = self._ask({"verb": "status", "pid": rank.pid, "timeout_s": timeout_s}, timeout_s=timeout_s + 10)
        assert status is None or isinstance(status, int)
        return status

    def interrupt(self, rank: RankProcess) -> None:
        """Kill a rank; its files stay until :meth:`end`."""
        for pid in self._own_pids(rank):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self, rank: RankProcess) -> None:
        """Kill a rank and all that descends from it."""
        kill_all(self._own_pids(rank), run=rank.run)
        if self._process is not None:
            with contextlib.suppress(OSError):
                self.status(rank)
        rank.connection.close()
        rank.output.unlink(missing_ok=True)
        rank.stacks.unlink(missing_ok=True)

    def close(self) -> None:
        """End the server with all its ranks. Safe twice."""
        process, control = self._process, self._control
        self._process = self._control = None
        if process is not None:
            kill_all([process.pid])
            process.wait()
        if control is not None:
            control.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _own_pids(self, rank: RankProcess) -> list[int]:
        """The rank's id, if the process of that id is still the rank: ids are used again."""
        with contextlib.suppress(psutil.Error):
            if self._process is not None and psutil.Process(rank.pid).ppid() == self._process.pid:
                return [rank.pid]
        return []

    def _ask(self, request: dict[str, Any], *descriptors: int, timeout_s: float) -> object:
        control = self._started()
        control.settimeout(timeout_s)
        socket.send_fds(control, [pickle.dumps(request)], list(descriptors))
        return self._answer(control)

    def _answer(self, control: socket.socket) -> object:
        try:
            message = control.recv(65536)
        except TimeoutError:
            message = b""
        if not message:
            raise OSError(f"the fork server ended or did not answer; it printed:\n{self._log.read_text()[-4000:]}")
        return pickle.loads(message)

    @property
    def _log(self) -> Path:
        return self._folder / "server.log"

    def _started(self) -> socket.socket:
        if self._control is not None:
            return self._control
        self._folder.mkdir(exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.support.worker", str(theirs.fileno()), str(os.getpid()), *self._preload]
        with theirs, open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=REPO_ROOT,
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._control = ours
        ours.settimeout(START_DEADLINE_S)
        try:
            self._answer(ours)
        except BaseException:
            self.close()
            raise
        return ours
