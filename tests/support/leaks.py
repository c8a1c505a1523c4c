"""What a test leaves behind: threads, children, descriptors, variables, files. Cheap enough for every test."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil

from tests.support.processes import REPO_ROOT, describe, is_alive

_IGNORED_THREADS = ("TMonitor", "pytest_timeout")  # tqdm's monitor lives as long as the process
_IGNORED_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "COLUMNS",
    "LINES",
    "KINETO_LOG_LEVEL",  # set when torch's profiler is imported
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # set when Lightning counts GPUs
    "TORCHINDUCTOR_CACHE_DIR",  # set when inductor is imported
    "TRITON_CACHE_DIR",
}
_IGNORED_DESCRIPTORS = ("/dev/null", "/dev/urandom", "anon_inode:[pidfd]")
_IGNORED_FILES = {".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".import_linter_cache", "__pycache__"}
# In a checkout, what people and installers make while the tests run.
_MADE_BY_OTHERS = (".md", ".py", ".cfg", ".ini", ".toml", ".txt", ".yaml", ".yml", ".swp", "~", ".egg-info")
_MADE_BY_OTHERS_NAMES = {"Makefile", "LICENSE", "NOTICE", "build", "dist"}
_SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Exempt:
    """What belongs to something longer-lived than the test, such as the pool of ready ranks."""

    pids: Collection[int] = ()
    descriptors: Collection[int] = ()

    def __add__(self, other: Exempt) -> Exempt:
        return Exempt({*self.pids, *other.pids}, {*self.descriptors, *other.descriptors})


@dataclass(frozen=True)
class Snapshot:
    """What there was at one moment."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    descriptors: Mapping[int, str]
    environment: Mapping[str, str]
    cwd: str
    files: frozenset[str]
    shm: frozenset[str]

    @classmethod
    def take(cls) -> Snapshot:
        """Look around."""
        cwd = os.getcwd()
        return cls(
            threads=frozenset(threading.enumerate()),
            children=frozenset(child_pids()),
            descriptors=open_descriptors(),
            environment=dict(os.environ),
            cwd=cwd,
            files=frozenset(os.listdir(cwd)),
            shm=frozenset(os.listdir(_SHM)) if _SHM.is_dir() else frozenset(),
        )

    def leaks(self, *, grace_s: float = 1.0, exempt: Callable[[], Exempt] = Exempt, files: bool = False) -> list[str]:
        """What is there now and was not then, a sentence each; what goes away within ``grace_s`` does not count.

        Args:
            grace_s: How long threads, children and files may take to end, in seconds.
            exempt: Gives what is not the test's.
            files: Look also for stray files in the working directory and in shared memory.
        """
        end = time.monotonic() + grace_s
        collected = False
        while True:
            lasting = exempt() + python_keeps()
            found = self._threads() + self._children(lasting) + self._descriptors(lasting)
            if files:
                found += self._files() + self._shared_memory()
            if not found or time.monotonic() > end:
                return found + self._environment()
            if not collected:
                gc.collect()
                collected = True
            else:
                time.sleep(0.01)

    def restore(self) -> None:
        """Put the environment and the working directory back, so that one leak does not show in every later test."""
        if dict(os.environ) != self.environment:
            for name in set(os.environ) - set(self.environment):
                del os.environ[name]
            os.environ.update(self.environment)
        os.chdir(self.cwd)

    def _threads(self) -> list[str]:
        return [
            f"thread {thread.name!r} still runs (daemon: {thread.daemon}); end and join it"
            for thread in threading.enumerate()
            if thread not in self.threads and thread.name not in _IGNORED_THREADS
        ]

    def _children(self, exempt: Exempt) -> list[str]:
        found = []
        for pid in child_pids():
            if pid in self.children or pid in exempt.pids:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                hint = "end it" if is_alive(process) else "wait for it"
                found.append(f"child {describe(process)} is left; {hint}")
        return found

    def _descriptors(self, exempt: Exempt) -> list[str]:
        return [
            f"file descriptor {number} -> {target} is left open; close it"
            for number, target in open_descriptors().items()
            if self.descriptors.get(number) != target
            and number not in exempt.descriptors
            and not target.startswith(_IGNORED_DESCRIPTORS)
        ]

    def _environment(self) -> list[str]:
        now, found = dict(os.environ), []
        for name in sorted(now.keys() | self.environment.keys()):
            before, after = self.environment.get(name), now.get(name)
            if before != after and name not in _IGNORED_VARIABLES:
                found.append(f"environment variable {name} was {before!r}, is {after!r}; use monkeypatch.setenv/delenv")
        if os.getcwd() != self.cwd:
            found.append(f"the working directory was {self.cwd}, is {os.getcwd()}; use monkeypatch.chdir")
        return found

    def _files(self) -> list[str]:
        new = set(os.listdir(self.cwd)) - self.files - _IGNORED_FILES
        if Path(self.cwd) == REPO_ROOT:
            new = {name for name in new - _MADE_BY_OTHERS_NAMES if not name.endswith(_MADE_BY_OTHERS)}
        return [f"{name} appeared in {self.cwd}; write to tmp_path" for name in sorted(new)]

    def _shared_memory(self) -> list[str]:
        if not _SHM.is_dir():
            return []
        new = sorted(set(os.listdir(_SHM)) - self.shm)
        strangers = _used_by_strangers([str(_SHM / name) for name in new]) if new else set()
        return [f"/dev/shm/{name} is left; unlink it" for name in new if str(_SHM / name) not in strangers]


def python_keeps() -> Exempt:
    """What multiprocessing keeps for as long as the process lives: its resource tracker, once it has started one."""
    tracker: Any = resource_tracker._resource_tracker
    if tracker._pid is None:
        return Exempt()
    return Exempt([tracker._pid], [tracker._fd])


def child_pids() -> list[int]:
    """Direct children of this process, zombies included."""
    found = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in Path("/proc/self/task", task, "children").read_text().split()]
    return found


def open_descriptors() -> dict[int, str]:
    """Descriptor -> what it refers to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _used_by_strangers(paths: list[str]) -> set[str]:
    """Those of the files that processes which do not descend from this one have mapped or open.

    By what the file is, not by its path: who makes a semaphore maps it under another name before it has its own.
    """
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    wanted: dict[tuple[int, int], str] = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            wanted[_identity(os.stat(path))] = path
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in ours:
            with contextlib.suppress(OSError):
                found |= {wanted[used] for used in _used_by(entry) if used in wanted}
    return found


def _used_by(pid: str) -> Iterator[tuple[int, int]]:
    """Device and inode of each file that a process has mapped or open."""
    for line in Path("/proc", pid, "maps").read_text().splitlines():
        device, inode = line.split(maxsplit=5)[3:5]
        major, minor = (int(part, 16) for part in device.split(":"))
        yield os.makedev(major, minor), int(inode)
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            yield _identity(os.stat(f"/proc/{pid}/fd/{number}"))


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
