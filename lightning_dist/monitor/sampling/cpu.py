"""How busy the CPU is with a rank: its threads, and the processes that read data for it."""

from __future__ import annotations

import contextlib
import os
import resource
import time

from lightning_dist.errors import UnmeasurableError
from lightning_dist.monitor.sampling.processes import PROC, RankProcesses, content
from lightning_dist.monitor.sampling.rates import Rates
from lightning_dist.monitor.sampling.source import Reading

_METRIC = "cpu_utilisation"


class CpuSource:
    """CPU time a second of the rank and what it has started: 1 is one core's worth.

    What a process has used goes over to its parent when that has waited for it, so that nothing is lost with readers
    that end.

    Args:
        processes: Of the rank.
    """

    metrics = (_METRIC,)
    is_fine = True

    def __init__(self, processes: RankProcesses) -> None:
        self._processes = processes
        self._rates = Rates()
        if not (PROC / "self" / "stat").exists():
            raise UnmeasurableError("there is no /proc")

    def read(self, now_ns: int) -> list[Reading]:
        """Since the last time."""
        waited_for = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = time.process_time() + waited_for.ru_utime + waited_for.ru_stime
        for pid in self._processes.started():
            with contextlib.suppress(OSError):  # it has just ended
                seconds += cpu_seconds(content(f"{PROC}/{pid}/stat"))
        return [Reading(_METRIC, rate) for rate in self._rates.of({_METRIC: seconds}, now_ns).values()]

    def close(self) -> None:
        """Nothing is held."""


def cpu_seconds(stat: bytes, *, ticks_per_s: int = os.sysconf("SC_CLK_TCK")) -> float:
    """CPU time of a process and of the children it has waited for, from ``/proc/PID/stat``.

    Args:
        stat: The file's content; the process's name in it may hold any character.
        ticks_per_s: Its unit.
    """
    fields = stat.rpartition(b")")[2].split()
    return sum(map(int, fields[11:15])) / ticks_per_s  # utime, stime, cutime, cstime
