"""How much memory a rank has."""

from __future__ import annotations

import os

from lightning_dist.errors import UnmeasurableError
from lightning_dist.monitor.sampling.processes import PROC, content
from lightning_dist.monitor.sampling.source import Reading


class MemorySource:
    """Resident memory of the rank's process, with what it shares with others.

    Its proportional share (PSS) would say more, but the kernel walks all pages for it, and training waits meanwhile.
    """

    metrics = ("memory",)
    is_fine = False

    def __init__(self) -> None:
        if not (PROC / "self" / "statm").exists():
            raise UnmeasurableError("there is no /proc")

    def read(self, now_ns: int) -> list[Reading]:
        """As it is now."""
        return [Reading("memory", resident_bytes(content(f"{PROC}/self/statm")))]

    def close(self) -> None:
        """Nothing is held."""


def resident_bytes(statm: bytes, *, page_bytes: int = os.sysconf("SC_PAGE_SIZE")) -> int:
    """Resident memory, from ``/proc/PID/statm``."""
    return int(statm.split()[1]) * page_bytes
