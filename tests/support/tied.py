"""Start a program that cannot outlive the process that started it, in a network namespace if one is given.

Run as ``python -I -S tied.py PARENT_PID NETNS ARGV...`` (``NETNS`` is ``-`` for none). Standard library only: it runs
before every fresh rank, and starts in some 20 ms.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1
CLONE_NEWNS = 0x00020000
CLONE_NEWNET = 0x40000000
MS_REC = 16384
MS_SLAVE = 1 << 19
MNT_DETACH = 2
NETNS_FOLDER = "/run/netns"


def tie_to_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; end now if that has happened already."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)


def enter_network(netns: str) -> None:
    """Move the calling thread, and it alone, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(os.path.join(NETNS_FOLDER, netns), "rb") as namespace:
        _check(libc.setns(namespace.fileno(), CLONE_NEWNET), f"setns({netns})")


def enter_host(netns: str) -> None:
    """Move this process (of one thread) into a network namespace, with a ``/sys`` that shows its interfaces."""
    libc = ctypes.CDLL(None, use_errno=True)
    enter_network(netns)
    _check(libc.unshare(CLONE_NEWNS), "unshare(CLONE_NEWNS)")
    _check(libc.mount(b"", b"/", b"none", MS_SLAVE | MS_REC, None), "mount(/, slave)")
    libc.umount2(b"/sys", MNT_DETACH)  # may not be mounted
    _check(libc.mount(netns.encode(), b"/sys", b"sysfs", 0, None), "mount(/sys)")


def _check(status: int, what: str) -> None:
    if status != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{what}: {os.strerror(errno)}")


def main(argv: list[str]) -> None:
    """Tie, enter, and become ``argv``."""
    parent_pid, netns, command = int(argv[1]), argv[2], argv[3:]
    tie_to_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where the tests run in the background of a shell
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # stuck ranks are ended by SIGABRT, for their stacks
    if netns != "-":
        enter_host(netns)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv)
