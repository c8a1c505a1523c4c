"""The command that a conductor has launched, and all processes that come from it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence

from lightning_dist.elastic.chaos.folder import HOST_VARIABLE, VARIABLE
from lightning_dist.elastic.chaos.host.processes import Process, kill_all, with_variable
from lightning_dist.errors import LaunchError
from lightning_dist.parent_watch import bound_command


class LaunchedCommand:
    """Starts a command, again if need be; its processes are found by a variable that they inherit.

    Args:
        command: Program and arguments.
        folder: Of the chaos, for the variable.
        host: Name of this host, likewise.
        environ: What it inherits beyond.
    """

    def __init__(self, command: Sequence[str], *, folder: str, host: str, environ: Mapping[str, str]) -> None:
        program = shutil.which(command[0])
        if program is None:
            raise LaunchError(f"{command[0]} cannot be started: there is no such program")
        self._command = [os.path.abspath(program), *command[1:]]
        self._folder, self._host = folder, host
        self._environ = {**environ, VARIABLE: folder, HOST_VARIABLE: host}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it. In a session of its own: signals reach it through the conductor, and once."""
        try:
            self._process = subprocess.Popen(bound_command(self._command), env=self._environ, start_new_session=True)
        except OSError as error:
            raise LaunchError(f"{self._command[0]} cannot be started: {error}") from error

    def status(self) -> int | None:
        """Its exit status, 128 and the signal if it was killed; ``None`` while it runs."""
        code = None if self._process is None else self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def send(self, number: int) -> None:
        """A signal to the command alone; nothing if it has ended."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def is_process(self, process: Process) -> bool:
        """Whether a process is the command's own."""
        return self._process is not None and self._process.pid == process.pid

    def kill(self) -> None:
        """SIGKILL to the command alone."""
        self.send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def kill_all(self) -> int:
        """SIGKILL to all that come from it; how many that were."""
        killed = len(self.processes())
        self.kill()
        while left := self.processes():  # one may have forked meanwhile
            kill_all(left)
        return killed

    def processes(self) -> list[Process]:
        """All that come from it and live, also those whose parents are gone."""
        ours = set(with_variable(VARIABLE, self._folder))
        return sorted(ours & set(with_variable(HOST_VARIABLE, self._host)), key=lambda process: process.pid)
