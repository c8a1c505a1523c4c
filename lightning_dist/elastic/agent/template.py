"""A process with its imports done, of which ranks are forked; :data:`CODE` starts it.

It has one thread, waits on a socket from the agent, and does three things: fork when it is asked to, say how each rank
ended, and end everything when the agent is gone, however that ended. To import torch and Lightning takes seconds, to
fork hundredths of one.

Note [what is left of a rank]
    A rank's process group is killed before its exit status is collected: until then its number belongs to nobody else.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from lightning_dist.elastic.agent import worker
from lightning_dist.elastic.agent.start import Start

IMPORTED = ("torch", "torch.distributed", "lightning.pytorch", "lightning_dist")
_MESSAGE_BYTES = 1 << 16
CODE = (
    "import sys; sys.path[:1] = [sys.argv[3]] if sys.path[0] == '' else sys.path[:1]; "
    "from lightning_dist.elastic.agent.template import main; main(sys.argv[1:])"
)
"""For ``python -c``, followed by :func:`main`'s arguments. The ranks' modules are found where the user's script would
find them, and nowhere else: a ``queue.py`` in the working directory is no concern of a script in another."""


class Server:
    """Forks ranks for the agent at the other end of a connection.

    Args:
        connection: A ``SOCK_SEQPACKET`` socket; its end is the agent's end.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._ranks: dict[int, tuple[int, int]] = {}  # pid of each by its descriptor, and the agent's key

    def tell(self, **message: Any) -> None:
        """Say something to the agent; if it is gone, that is seen in :meth:`serve`."""
        with contextlib.suppress(OSError):
            self._connection.send(json.dumps(message).encode())

    def serve(self) -> Start | None:
        """Serve until the agent is gone (``None``), or until this is a forked process that is to run something."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._connection:
                    self._collect(key.fd)
                    continue
                received = self._receive()
                if received is None:
                    self._end_all()
                    return None
                start = self._fork(*received)
                if start is not None:
                    return start

    def _receive(self) -> tuple[Start, int, int] | None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._connection, _MESSAGE_BYTES, 3)
        except OSError:
            return None
        if not data:
            return None
        file, stdout, stderr = descriptors
        return Start.from_file(file), stdout, stderr

    def _fork(self, start: Start, stdout: int, stderr: int) -> Start | None:
        template = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._close()
            worker.become(start, stdout=stdout, stderr=stderr, parent=template)
            return start
        os.close(stdout)
        os.close(stderr)
        with contextlib.suppress(OSError):  # whoever is first: the agent may signal the group from now on
            os.setpgid(pid, pid)
        pidfd = os.pidfd_open(pid)
        self._ranks[pidfd] = (pid, start.key)
        self._selector.register(pidfd, selectors.EVENT_READ)
        self.tell(event="started", key=start.key, pid=pid)
        return None

    def _collect(self, pidfd: int) -> None:
        pid, key = self._ranks.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _kill_group(pid)  # see Note [what is left of a rank]
        _, status = os.waitpid(pid, 0)
        self.tell(event="ended", key=key, pid=pid, status=os.waitstatus_to_exitcode(status))

    def _end_all(self) -> None:
        for pid, _ in self._ranks.values():
            _kill_group(pid)
        for pid, _ in self._ranks.values():
            os.waitpid(pid, 0)

    def _close(self) -> None:
        """In a forked process: what is the template's is not its own."""
        self._selector.close()
        self._connection.close()
        for pidfd in self._ranks:
            os.close(pidfd)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def why_not_forkable() -> str | None:
    """Why a process forked from this one would not work; ``None``: it does."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"a module that was imported has started {threads - 1} threads, which a forked process lacks"
    torch = sys.modules.get("torch")
    if torch is not None and (torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()):
        return "a module that was imported has used CUDA, which a forked process cannot use again"
    return None


def preload(modules: Sequence[str]) -> str | None:
    """Import modules; what went wrong, or ``None``."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # it is the user's own code that runs here
            return f"{module} cannot be imported: {type(error).__name__}: {error}"
    return why_not_forkable()


def run_forked(arguments: Sequence[str], *, parent: int) -> NoReturn:
    """Become a template in a process that was forked from the agent, to its end; so does each rank forked of it.

    Args:
        arguments: See :func:`main`.
        parent: The agent's process id.
    """
    code = 1
    try:
        os.setsid()
        worker.die_with_parent(parent)
        connection = int(arguments[0])
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.closerange(3, connection)
        os.closerange(connection + 1, os.sysconf("SC_OPEN_MAX"))
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = arguments[2]
        main(arguments)
        code = 0
    finally:
        os._exit(code)  # the agent's own code must not go on here


def main(arguments: Sequence[str]) -> None:
    """See the module.

    Args:
        arguments: Descriptor of the socket, the agent's folder, where modules of the program are, and which of them
            to import.
    """
    for signum in (signal.SIGINT, *worker.DEFAULT_SIGNALS):
        signal.signal(signum, signal.SIG_IGN)  # they are meant for the agent, and for ranks
    descriptor, folder, _, *modules = arguments
    server = Server(socket.socket(fileno=int(descriptor)))
    problem = preload([*IMPORTED, *modules])
    worker.die_with_parent(os.getppid(), 0)  # from now on the socket tells, and ranks' own children end as well
    gc.collect()
    gc.freeze()
    server.tell(event="ready", pid=os.getpid(), problem=problem)
    start = server.serve()
    if start is None:
        shutil.rmtree(folder, ignore_errors=True)  # which an agent that was killed has left
        return
    worker.run(start)
