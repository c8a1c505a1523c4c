"""A child process that ends when its parent does, however the parent ends.

Two mechanisms in turn. :func:`bound_command` wraps the child's command so that the kernel kills it together with its
parent (Linux), which covers the seconds in which it only imports. :func:`watch_parent`, called by the child once it
can, takes over with a thread that waits for the end of a pipe: unlike the kernel's signal this also ends the child's
own workers, and does not depend on which thread of the parent started the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

PIPE_VARIABLE = "HIERDIST_PARENT_PIPE"

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.25

# Runs before the command, in the same process; the signal survives exec. The parent may be gone before it is set.
_BIND_TO_PARENT = f"""
import os, sys
try:
    import ctypes
    ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, 9, 0, 0, 0)
except Exception:
    pass
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def bound_command(command: Sequence[str]) -> list[str]:
    """The command, started so that it dies with this process; unchanged where that cannot be.

    Args:
        command: Its first word is the path of a program.
    """
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _BIND_TO_PARENT, str(os.getpid()), *command]


def describe_pipe(read_fd: int) -> str:
    """What a child has to know to find the pipe: our process id, the descriptor, and the pipe's identity."""
    status = os.fstat(read_fd)
    return f"{os.getpid()}:{read_fd}:{status.st_dev}:{status.st_ino}"


def watch_parent() -> None:
    """End this process when the process that launched it ends. Does nothing in processes that were not launched by us.

    Starts a daemon thread and returns at once. The variable that says what to watch is removed, so that programs which
    this process starts do not take themselves for a rank.
    """
    text = os.environ.pop(PIPE_VARIABLE, None)
    if text is None:
        return
    parent, fd, *identity = (int(part) for part in text.split(":"))
    with contextlib.suppress(OSError):
        status = os.fstat(fd)
        if [status.st_dev, status.st_ino] == identity:
            os.set_inheritable(fd, False)
            _start_thread(_wait_for_pipe, fd, parent)
            _take_over_from_kernel()
            return
    if os.getppid() == parent:  # the descriptor was closed or is something else by now
        _start_thread(_wait_for_new_parent, parent)


@functools.cache
def bind_workers() -> None:
    """Let daemonic processes that are forked from this one (of data loaders) end within a second after it, if killed.

    Torch's own watch in the workers takes up to five seconds.
    """
    multiprocessing.util.register_after_fork(_BIND_WORKERS, _watch_in_worker)


class _Token:
    """Multiprocessing keeps what is registered after fork for as long as such an object lives."""


_BIND_WORKERS = _Token()


def _watch_in_worker(token: _Token) -> None:
    del token
    if multiprocessing.current_process().daemon:
        _start_thread(_exit_with_parent, os.getppid())


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)


def _take_over_from_kernel() -> None:
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def _start_thread(function: Callable[..., None], *args: int) -> None:
    threading.Thread(target=function, args=args, name="parent-watch", daemon=True).start()


def _wait_for_pipe(fd: int, parent: int) -> None:
    try:
        while os.read(fd, 1):
            pass
    except OSError:  # closed under us
        _wait_for_new_parent(parent)
        return
    _end(parent)


def _wait_for_new_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    _end(parent)


def _end(parent: int) -> None:
    with contextlib.suppress(Exception):
        for worker in multiprocessing.active_children():  # of a data loader
            worker.kill()
    with contextlib.suppress(Exception):
        rank = os.environ.get("LOCAL_RANK", "?")
        sys.stderr.write(f"lightning_dist: main process {parent} is gone; local rank {rank} ends\n")
        sys.stderr.flush()
    os._exit(1)
