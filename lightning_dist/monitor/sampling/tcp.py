"""How often TCP has to send again what got lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lightning_dist.errors import UnmeasurableError
from lightning_dist.monitor.sampling.processes import PROC, content
from lightning_dist.monitor.sampling.rates import Rates
from lightning_dist.monitor.sampling.source import Reading

# Of the thread that reads: its network namespace's counters, which are all that the host's ranks send there.
_FILE = f"{PROC}/thread-self/net/snmp"
_PER_STEP = "tcp_retransmits_per_step"
_METRIC_OF = {"RetransSegs": "tcp_retransmits", "OutSegs": "tcp_sent_segments"}


class TcpSource:
    """Segments that this host's TCP has sent, and has sent again, a second; and again, a step.

    Args:
        steps: How many steps there were by now.
        path: The kernel's file.
    """

    metrics = (*_METRIC_OF.values(), _PER_STEP)
    is_fine = False

    def __init__(self, steps: Callable[[], int], *, path: str = _FILE) -> None:
        self._steps = steps
        self._path = path
        self._rates = Rates()
        self._before: tuple[int, int] | None = None  # steps, and segments sent again by then
        try:
            self._counters()
        except (OSError, ValueError) as error:
            raise UnmeasurableError(f"{path} cannot be read: {error}") from error

    def read(self, now_ns: int) -> list[Reading]:
        """Since the last time; a step, since the last time that there was another step."""
        counts = self._counters()
        rates = self._rates.of(counts, now_ns)
        return [*(Reading(_METRIC_OF[name], rate) for name, rate in rates.items()), *self._per_step(counts)]

    def close(self) -> None:
        """Nothing is held."""

    def _counters(self) -> dict[str, int]:
        counters = tcp_counters(content(self._path).decode())
        return {name: counters[name] for name in _METRIC_OF}

    def _per_step(self, counts: Mapping[str, int]) -> list[Reading]:
        steps, again = self._steps(), counts["RetransSegs"]
        before = self._before
        if before is not None and steps == before[0]:
            return []
        self._before = (steps, again)
        if before is None or steps < before[0] or again < before[1]:
            return []
        return [Reading(_PER_STEP, (again - before[1]) / (steps - before[0]))]


def tcp_counters(snmp: str) -> dict[str, int]:
    """The counters of TCP, by the kernel's names, from ``/proc/net/snmp``.

    Raises:
        ValueError: They are not in it.
    """
    rows = [line.split()[1:] for line in snmp.splitlines() if line.startswith("Tcp:")]
    if len(rows) != 2:
        raise ValueError(f"it has {len(rows)} lines of TCP, not 2: names and values")
    counters = dict(zip(rows[0], map(int, rows[1]), strict=False))
    missing = [name for name in _METRIC_OF if name not in counters]
    if missing:
        raise ValueError(f"it has no {' and no '.join(missing)}")
    return counters
