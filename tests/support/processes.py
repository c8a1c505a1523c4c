"""Finding and ending processes, whatever they did to hide; the environment and ports they start with."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

REPO_ROOT = Path(__file__).resolve().parents[2]
SESSION_VARIABLE = "RANKS_TEST_SESSION"
RUN_VARIABLE = "RANKS_TEST_RUN"

_LAUNCHER_VARIABLES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "COLUMNS", "LINES",
}  # fmt: skip
_LAUNCHER_PREFIXES = ("HIERDIST_", "TORCHELASTIC_", "SLURM_", "GLOO_", "NCCL_", "TORCH_NCCL_", "PL_", "HYDRA_", "ROLE_",
                      "PYTEST_", "COV_", "TP_SOCKET_")  # fmt: skip


def clean_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what launchers, clusters and test runners left in it, plus ``changes``."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = "1"
    path = [str(REPO_ROOT), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
    environment["PYTHONFAULTHANDLER"] = "1"  # SIGABRT prints the stacks
    environment["PYTHONUNBUFFERED"] = "1"
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    # TCPStore's server asks for the name of each client in its only thread: without an answering DNS, 5 s a time.
    environment["RES_OPTIONS"] = "timeout:1 attempts:1"
    environment.update(changes or {})
    return environment


def as_command(argv: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    """A command line; this Python is put before a script (``x.py``) and before options (``-m``, ``-c``)."""
    command = [os.fspath(argv)] if isinstance(argv, str | os.PathLike) else [os.fspath(part) for part in argv]
    if command[0].endswith(".py") or command[0].startswith("-"):
        return [sys.executable, *command]
    if command[0] in ("python", "python3"):
        return [sys.executable, *command[1:]]
    return command


def free_port() -> int:
    """A TCP port nobody has, outside the range from which the kernel hands out ports to others."""
    choose = random.Random(os.urandom(8))
    for _ in range(1000):
        port = choose.randrange(20000, 32000)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError("no free TCP port between 20000 and 32000")


def marked_processes(variable: str, value: str) -> list[psutil.Process]:
    """Living processes that were started with ``variable=value`` in their environment, this one excepted."""
    wanted = f"{variable}={value}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            environment = Path("/proc", entry, "environ").read_bytes()
            if wanted in environment.split(b"\0"):
                process = psutil.Process(int(entry))
                if is_alive(process):
                    found.append(process)
    return found


def descendants(pids: Iterable[int]) -> list[psutil.Process]:
    """The living processes with these ids, and all that descend from them."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for member in [process, *process.children(recursive=True)]:
                if is_alive(member):
                    found[member.pid] = member
    return list(found.values())


def is_alive(process: psutil.Process) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def pid_lives(pid: int) -> bool:
    """Whether there is a process of this id that is not a zombie (which its parent has yet to collect)."""
    try:
        return is_alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def kill_all(pids: Iterable[int], *, run: str | None = None, deadline_s: float = 10.0) -> None:
    """Kill processes with all that descend from them, and all that carry the mark of ``run``, until none is left.

    Raises:
        TimeoutError: Some still live at the deadline.
    """
    roots = list(pids)
    end = time.monotonic() + deadline_s
    while True:
        living = {process.pid: process for process in descendants(roots)}
        if run is not None:
            living.update((process.pid, process) for process in marked_processes(RUN_VARIABLE, run))
        if not living:
            return
        if time.monotonic() > end:
            raise TimeoutError(f"not killed within {deadline_s:g} s: {'; '.join(map(describe, living.values()))}")
        for process in living.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.005)  # psutil's own wait would take the exit status away from subprocess


def describe(process: psutil.Process) -> str:
    """A process in one line."""
    try:
        command = " ".join(process.cmdline())[:200] or process.name()
        return f"pid {process.pid} ({process.status()}): {command}"
    except psutil.Error:
        return f"pid {process.pid} (gone)"
