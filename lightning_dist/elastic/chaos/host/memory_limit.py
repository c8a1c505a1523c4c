"""A bound on a process's memory, by a control group of its own: beyond it the kernel kills the process. Needs root."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lightning_dist.elastic.chaos.host.processes import Process
from lightning_dist.elastic.chaos.host.refusal import Refused

HEADROOM_BYTES = 64 << 20
"""What the process may still have."""
_MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class MemoryGroup:
    """A control group.

    Attributes:
        path: Of its folder.
        mounted: What was mounted for it; ``None``: nothing.
    """

    path: Path
    mounted: Path | None

    def kills(self) -> int:
        """How many processes the kernel has killed in it for want of memory."""
        for name in ("memory.events", "memory.oom_control"):  # of the second version, and of the first
            for line in _text(self.path / name).splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def remove(self) -> bool:
        """Once its processes have ended; whether it is gone."""
        try:
            self.path.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            return False
        if self.mounted is not None:
            _run("umount", "-l", str(self.mounted))
            with contextlib.suppress(OSError):
                self.mounted.rmdir()
        return True


def bound(process: Process) -> MemoryGroup:
    """Let a process have :data:`HEADROOM_BYTES` more than now: what it has stays charged to the group it was in.

    Raises:
        Refused: Memory groups cannot be made here.
    """
    hierarchy = _hierarchy()
    limit, swap = _LIMITS[hierarchy.is_second]
    group = MemoryGroup(hierarchy.parent(process) / f"hierdist-chaos-{process.pid}", hierarchy.mounted)
    try:
        group.path.mkdir()
        _set(group.path / limit, HEADROOM_BYTES)
        with contextlib.suppress(OSError):  # where there is no swap
            _set(group.path / swap, 0 if hierarchy.is_second else HEADROOM_BYTES)
        _set(group.path / "cgroup.procs", process.pid)
    except OSError as error:
        group.remove()
        raise Refused(f"a memory group cannot be made: {error}") from error
    return group


_LIMITS = {
    False: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    True: ("memory.max", "memory.swap.max"),
}


@dataclass(frozen=True)
class _Hierarchy:
    """Where memory groups are.

    Attributes:
        root: Folder of the first.
        is_second: Of the second version of control groups.
        mounted: What was mounted for it; ``None``: nothing.
    """

    root: Path
    is_second: bool
    mounted: Path | None = None

    def parent(self, process: Process) -> Path:
        """The group that the process is in, so that its bounds hold on; in the second version, which has processes in
        leaves only, the one above it. The first one where that is not seen.
        """
        for line in _text(Path(f"/proc/{process.pid}/cgroup")).splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" if self.is_second else "memory" in controllers.split(","):
                own = self.root / path.lstrip("/")
                found = own.parent if self.is_second and own != self.root else own
                return found if (found / "cgroup.procs").exists() else self.root
        return self.root


def _hierarchy() -> _Hierarchy:
    second: Path | None = None
    for line in _MOUNTS.read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ")[:3]
        where = Path(before.split(" ")[4])
        if kind == "cgroup" and "memory" in options.split(","):
            return _Hierarchy(where, False)
        if kind == "cgroup2" and "memory" in _text(where / "cgroup.subtree_control").split():
            second = where
    if second is not None:
        return _Hierarchy(second, True)
    mounted = Path(tempfile.mkdtemp(prefix="hierdist-chaos-"))
    problem = _run("mount", "-t", "cgroup", "-o", "memory", "none", str(mounted))
    if problem is not None:
        mounted.rmdir()
        raise Refused(f"no memory groups are mounted here, and cannot be: {problem}")
    return _Hierarchy(mounted, False, mounted)


def _run(*command: str) -> str | None:
    """Why it did not work; ``None``: it did."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30.0)
    return f"{' '.join(command)}: {done.stderr.strip()}" if done.returncode else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _set(path: Path, value: int) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)
