"""Whether this host has memory to train in, and gives back what was written to it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from lightning_dist.elastic.health.findings import Outcome
from lightning_dist.elastic.health.request import Request

_PATTERNS = (np.uint64(0x5555555555555555), np.uint64(0xAAAAAAAAAAAAAAAA))
_MEMINFO = Path("/proc/meminfo")


def check_memory(request: Request) -> Outcome:
    """Free memory, and patterns written and read back."""
    limits = request.limits
    free_bytes = available_bytes(_MEMINFO.read_text())
    figures = {"memory_free_bytes": float(free_bytes)}
    if free_bytes < limits.memory_free_bytes:
        text = f"{free_bytes >> 20} MiB of memory are free, at least {limits.memory_free_bytes >> 20} MiB are needed"
        return Outcome((text,), figures)
    wrong, bytes_per_s = _pattern(limits.memory_tested_bytes)
    figures["memory_bytes_per_s"] = bytes_per_s
    if wrong:
        return Outcome((f"{wrong} words of {limits.memory_tested_bytes >> 20} MiB came back changed",), figures)
    return Outcome((), figures)


def available_bytes(meminfo: str) -> int:
    """What processes can still have without swapping, from ``/proc/meminfo``."""
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ValueError("/proc/meminfo has no line MemAvailable")


def _pattern(size_bytes: int) -> tuple[int, float]:
    """Words that came back changed, and bytes a second in the thread's own time."""
    numbers = np.arange(max(1, size_bytes // 8), dtype=np.uint64)  # so that crossed address lines show
    words = np.empty_like(numbers)
    wrong = 0
    begin_ns = time.thread_time_ns()
    for pattern in _PATTERNS:
        np.bitwise_xor(numbers, pattern, out=words)
        words ^= pattern
        wrong += int(np.count_nonzero(words != numbers))
    seconds = max(time.thread_time_ns() - begin_ns, 1000) / 1e9
    return wrong, len(_PATTERNS) * words.nbytes / seconds
