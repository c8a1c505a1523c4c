"""How many bytes a host sends and receives."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from lightning_dist.errors import UnmeasurableError
from lightning_dist.monitor.sampling.processes import PROC, content
from lightning_dist.monitor.sampling.rates import Rates
from lightning_dist.monitor.sampling.source import Reading

_FILE = f"{PROC}/thread-self/net/dev"
_SYS = Path("/sys/class/net")


class Traffic(NamedTuple):
    """Bytes of one interface since it is there."""

    received: int
    sent: int


class NetworkSource:
    """Bytes a second over all interfaces but the loopback, of this network namespace.

    Where there are physical ones, these alone: what goes over a bond, a VLAN or a bridge goes over them too, and would
    be counted twice.

    Args:
        path: The kernel's file of interfaces.
        sys: The kernel's folder of interfaces.
        index_of: Number of an interface in this thread's namespace.
    """

    metrics = ("network_sent", "network_received")
    is_fine = False

    def __init__(
        self, *, path: str = _FILE, sys: Path = _SYS, index_of: Callable[[str], int] = socket.if_nametoindex
    ) -> None:
        self._path = path
        self._rates = Rates()
        try:
            found = interface_traffic(content(path).decode())
        except (OSError, ValueError) as error:
            raise UnmeasurableError(f"{path} cannot be read: {error}") from error
        own = [name for name in found if _is_of_this_namespace(name, sys, index_of)]
        self.interfaces = tuple(name for name in own if (sys / name / "device").exists()) or tuple(found)
        self.facts = {
            "interfaces": list(self.interfaces),
            "link_bytes_per_s": max(filter(None, (_speed(sys / name) for name in own)), default=None),
        }
        if not self.interfaces:
            raise UnmeasurableError("there is no network interface but the loopback")

    def read(self, now_ns: int) -> list[Reading]:
        """Since the last time."""
        found = interface_traffic(content(self._path).decode())
        counts = {}
        for name in self.interfaces:
            if name in found:
                counts[f"r {name}"], counts[f"s {name}"] = found[name]
        rates = self._rates.of(counts, now_ns)
        if not rates:
            return []
        return [
            Reading("network_sent", sum(rate for name, rate in rates.items() if name.startswith("s "))),
            Reading("network_received", sum(rate for name, rate in rates.items() if name.startswith("r "))),
        ]

    def sent_bytes(self) -> int:
        """Bytes sent over all of them since they are there."""
        found = interface_traffic(content(self._path).decode())
        return sum(found[name].sent for name in self.interfaces if name in found)

    def close(self) -> None:
        """Nothing is held."""


def interface_traffic(dev: str) -> Mapping[str, Traffic]:
    """Bytes by interface, without the loopback, from ``/proc/net/dev``; names may hold colons."""
    found = {}
    for line in dev.splitlines()[2:]:
        name, colon, numbers = line.rpartition(":")
        fields = numbers.split()
        if colon and len(fields) >= 9 and name.strip() != "lo":
            found[name.strip()] = Traffic(int(fields[0]), int(fields[8]))
    return found


def _is_of_this_namespace(name: str, sys: Path, index_of: Callable[[str], int]) -> bool:
    """``/sys`` may be mounted for another namespace, which has interfaces of the same name."""
    try:
        return int((sys / name / "ifindex").read_text()) == index_of(name)
    except (OSError, ValueError):
        return False


def _speed(interface: Path) -> float | None:
    """Bytes a second, if it is up and says it; the kernel's unit is Mbit/s, and -1 is unknown."""
    with contextlib.suppress(OSError, ValueError):
        if (interface / "operstate").read_text().strip() == "up":
            mbit = int((interface / "speed").read_text())
            return mbit * 1e6 / 8 if mbit > 0 else None
    return None
