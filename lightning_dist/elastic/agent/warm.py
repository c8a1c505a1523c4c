"""The agent's side of a template: starts it, asks it for ranks, hears how they end."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_dist.elastic.agent.forked import Forked, Process
from lightning_dist.elastic.agent.start import Start
from lightning_dist.elastic.agent.template import CODE, run_forked, why_not_forkable
from lightning_dist.errors import LaunchError
from lightning_dist.parent_watch import bound_command

_MESSAGE_BYTES = 1 << 16


@dataclass(frozen=True)
class Ended:
    """A rank's end.

    Attributes:
        key: What the agent called it.
        status: Its exit code, or the signal that ended it, negative.
    """

    key: int
    status: int


class TemplateLostError(LaunchError):
    """The template is gone, and with it all ranks that it has forked."""


class WarmProcess:
    """A template, and the ranks that are forked of it. To be used in a ``with`` statement, by one thread.

    Args:
        folder: The agent's private folder; the template removes it if the agent is killed.
        import_folder: Where Python looks for modules first.
        preload: Modules to import before the first rank is forked, besides torch, Lightning and this package.
        environment: The template's; ranks have their own, but what libraries read when they are loaded comes from it.
        may_fork: This process is the agent's alone, and has imported what a template needs: fork it, if that can be.
        ready_s: How long imports may take, in seconds.

    Note: two ways to start it.
        An agent has torch and Lightning loaded as well, so that a template forked from it is there at once, and shares
        its memory. That can be while it has one thread: at its start. One that has to be started later, because the
        first was killed, or whose libraries would be loaded with other variables, runs a new Python.
    """

    def __init__(
        self,
        folder: Path,
        *,
        import_folder: str,
        preload: Sequence[str] = (),
        environment: Mapping[str, str],
        may_fork: bool = False,
        ready_s: float = 300.0,
    ) -> None:
        self._may_fork = may_fork
        self._arguments = [str(folder), import_folder, *preload]
        self._environment = dict(environment)
        self._ready_s = ready_s
        self._process: Process | None = None
        self._connection: socket.socket | None = None
        self.is_ready = False
        """Its imports are done."""
        self._ended: list[Ended] = []

    def __enter__(self) -> WarmProcess:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Start the process; returns at once, :meth:`start` waits until its imports are done."""
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            arguments = [str(theirs.fileno()), *self._arguments]
            try:
                self._process = self._fork(arguments) if self._is_forkable() else self._execute(arguments)
            except BaseException:
                ours.close()
                raise
        self._connection = ours
        self.is_ready = False

    def fileno(self) -> int:
        """Readable when there is something to :meth:`collect`; -1 if the process is gone."""
        return -1 if self._connection is None else self._connection.fileno()

    @property
    def is_alive(self) -> bool:
        """Whether ranks can be forked of it."""
        return self._connection is not None

    def wait_ready(self) -> None:
        """Wait until its imports are done.

        Raises:
            LaunchError: A module cannot be imported, or does what rules out to fork.
            TemplateLostError: The process ended meanwhile.
        """
        deadline = time.monotonic() + self._ready_s
        while not self.is_ready:
            self._note(self._read(deadline, "its imports"))

    def start(self, start: Start, *, stdout: int, stderr: int) -> int:
        """Start a rank.

        Args:
            start: What it is.
            stdout: Descriptor of its standard output; stays the caller's.
            stderr: Likewise.

        Returns:
            Its process id, which is its process group's as well.

        Raises:
            TemplateLostError: The process is gone.
        """
        self.wait_ready()
        assert self._connection is not None
        file = start.to_file()
        try:
            socket.send_fds(self._connection, [b"start"], [file, stdout, stderr])
        except OSError as error:
            raise self._lost(f"cannot be reached: {error}") from error
        finally:
            os.close(file)
        deadline = time.monotonic() + self._ready_s
        while True:
            message = self._read(deadline, "a fork")
            if message["event"] == "started" and message["key"] == start.key:
                return int(message["pid"])
            self._note(message)

    def collect(self) -> list[Ended]:
        """The ranks that have ended since the last call; returns at once.

        Raises:
            LaunchError: See :meth:`wait_ready`.
            TemplateLostError: The process is gone; its ranks are, too.
        """
        while self._connection is not None and select.select([self._connection], [], [], 0)[0]:
            self._note(self._read(time.monotonic(), "nothing"))
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """End the process and all its ranks. Safe to call twice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()  # at which it kills the ranks, collects them, and ends
        process, self._process = self._process, None
        if process is None:
            return
        if not self.is_ready:
            process.kill()  # it is importing, and has no ranks
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _is_forkable(self) -> bool:
        threads = "OMP_NUM_THREADS"
        same = os.environ.get(threads) == self._environment.get(threads)
        return self._may_fork and same and why_not_forkable() is None

    def _fork(self, arguments: list[str]) -> Process:
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        pid = os.fork()
        if pid == 0:
            run_forked(arguments, parent=parent)
        return Forked(pid)

    def _execute(self, arguments: list[str]) -> Process:
        return subprocess.Popen(
            bound_command([sys.executable, "-c", CODE, *arguments]),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[int(arguments[0])],
            start_new_session=True,  # a terminal's Ctrl-C is for the agent
        )

    def _note(self, message: dict[str, Any]) -> None:
        if message["event"] == "ready":
            if message["problem"] and isinstance(self._process, Forked):  # it may be the agent that has used CUDA
                self._may_fork = False
                self.open()
                return
            self.is_ready = True
            if message["problem"]:
                self.close()
                raise LaunchError(f"ranks cannot be started: {message['problem']}; look at --preload")
        if message["event"] == "ended":
            self._ended.append(Ended(message["key"], message["status"]))

    def _read(self, deadline: float, what: str) -> dict[str, Any]:
        if self._connection is None:
            raise TemplateLostError("the template is not there")
        left = max(0.0, deadline - time.monotonic())
        if not select.select([self._connection], [], [], left)[0]:
            raise self._lost(f"did not do {what} within {self._ready_s:g} s")
        try:
            data = self._connection.recv(_MESSAGE_BYTES)
        except OSError as error:
            raise self._lost(str(error)) from error
        if not data:
            raise self._lost("has ended")
        message: dict[str, Any] = json.loads(data)
        return message

    def _lost(self, why: str) -> TemplateLostError:
        process, self._ended = self._process, []
        if process is not None:
            process.kill()  # one that lives would take its agent for gone, and remove the folder
        self.close()
        status = process.returncode if process is not None else None
        return TemplateLostError(f"the process of which ranks are forked {why} (exit status {status})")
