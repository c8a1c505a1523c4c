"""Whether the folders that a run writes to take what is written, and have room."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from lightning_dist.elastic.health.findings import Outcome
from lightning_dist.elastic.health.request import Request


def check_disk(request: Request) -> Outcome:
    """Each folder: room, and a file that is written, made durable and read back. The slowest counts."""
    limits = request.limits
    findings: list[str] = []
    rates: list[float] = []
    for folder in request.folders:
        try:
            there = _existing(Path(folder))
            free_bytes = shutil.disk_usage(there).free
            if free_bytes < limits.disk_free_bytes:
                needed = f"at least {limits.disk_free_bytes >> 20} MiB are needed"
                findings.append(f"{folder} has {free_bytes >> 20} MiB of room, {needed}")
                continue
            is_same, bytes_per_s = _round_trip(there, limits.disk_tested_bytes)
        except OSError as error:
            findings.append(f"{folder} cannot be written: {error}")
            continue
        rates.append(bytes_per_s)
        if not is_same:
            findings.append(f"{folder} gives back other bytes than were written")
        if bytes_per_s < limits.disk_bytes_per_s:
            allowed = f"at least {limits.disk_bytes_per_s:.3g} are needed"
            findings.append(f"{folder} takes {bytes_per_s:.3g} bytes a second, {allowed}")
    return Outcome(tuple(findings), {"disk_bytes_per_s": min(rates)} if rates else {})


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it: the run makes the rest."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def _round_trip(folder: Path, size_bytes: int) -> tuple[bool, float]:
    """Whether the bytes are the same, and bytes a second of writing."""
    path = folder / f".hierdist-checkup-{os.getpid()}"
    data = os.urandom(1 << 16) * max(1, size_bytes >> 16)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        begin_s = time.monotonic()
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
        seconds = max(time.monotonic() - begin_s, 1e-6)
        with contextlib.suppress(OSError):  # so that it is read from the disk; not every file system can
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        with os.fdopen(os.dup(descriptor), "rb") as file:
            is_same = file.read() == data
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)
    return is_same, len(data) / seconds
