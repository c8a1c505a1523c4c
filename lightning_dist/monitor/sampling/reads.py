"""How much a rank reads: from disk, from the system's cache of it, and from the network by ``read``."""

from __future__ import annotations

import contextlib

from lightning_dist.errors import UnmeasurableError
from lightning_dist.monitor.sampling.processes import PROC, RankProcesses, content
from lightning_dist.monitor.sampling.rates import Rates
from lightning_dist.monitor.sampling.source import Reading

_METRIC = "read_bytes"


class ReadSource:
    """Bytes that the rank and what it has started have read, a second.

    What comes by ``mmap`` is not counted, nor what collectives receive. The kernel hands the count of a process to
    its parent when that has waited for it, so that nothing is lost with readers that end.

    Args:
        processes: Of the rank.
    """

    metrics = (_METRIC,)
    is_fine = False

    def __init__(self, processes: RankProcesses) -> None:
        self._processes = processes
        self._rates = Rates()
        try:
            characters_read(content(f"{PROC}/self/io"))
        except (OSError, ValueError) as error:
            raise UnmeasurableError(f"/proc/self/io cannot be read: {error}") from error

    def read(self, now_ns: int) -> list[Reading]:
        """Since the last time."""
        count = characters_read(content(f"{PROC}/self/io"))
        for pid in self._processes.started():
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                count += characters_read(content(f"{PROC}/{pid}/io"))
        return [Reading(_METRIC, rate) for rate in self._rates.of({_METRIC: count}, now_ns).values()]

    def close(self) -> None:
        """Nothing is held."""


def characters_read(io: bytes) -> int:
    """Bytes read, from ``/proc/PID/io``.

    Raises:
        ValueError: They are not in it.
    """
    for line in io.splitlines():
        name, _, value = line.partition(b":")
        if name == b"rchar":
            return int(value)
    raise ValueError("it has no rchar")
