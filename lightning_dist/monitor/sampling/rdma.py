"""How often RDMA has to send again, and how much it sends: counters of InfiniBand and RoCE devices."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from lightning_dist.errors import UnmeasurableError
from lightning_dist.monitor.sampling.rates import Rates
from lightning_dist.monitor.sampling.source import Reading

_SYS = Path("/sys/class/infiniband")

# Each counts requests that a queue pair had to send again; which of them there are depends on the driver.
RETRANSMITS = (
    "packet_seq_err",  # mlx5: told that packets were missing
    "implied_nak_seq_err",  # mlx5: likewise, by a reply to a later request
    "local_ack_timeout_err",  # mlx5: no reply in time
    "rnr_nak_retry_err",  # mlx5: the receiver was not ready
    "seq_err_naks_rcvd",  # bnxt_re
    "to_retransmits",  # bnxt_re
    "rnr_naks_rcvd",  # bnxt_re
    "RetransSegs",  # irdma
    "tcpRetransSegs",  # irdma, earlier
    "retrans_pkts",  # efa
)
_WORD_BYTES = 4  # the unit of the counters of data


class RdmaSource:
    """What all ports of this host's RDMA devices have sent again, sent and received, a second.

    Args:
        sys: The kernel's folder of devices.
    """

    metrics = ("rdma_retransmits", "rdma_sent", "rdma_received")
    is_fine = False

    def __init__(self, *, sys: Path = _SYS) -> None:
        self._ports = tuple(sorted(sys.glob("*/ports/*")))
        self._rates = Rates()
        if not self._ports:
            raise UnmeasurableError(f"there is no RDMA device in {sys}")
        if not any(_numbers(port / "hw_counters") for port in self._ports):
            raise UnmeasurableError(f"the RDMA devices in {sys} have no hw_counters")

    def read(self, now_ns: int) -> list[Reading]:
        """Since the last time."""
        counts: dict[str, float] = {}
        for port in self._ports:
            for name, value in rdma_counts(_numbers(port / "hw_counters"), _numbers(port / "counters")).items():
                counts[f"{name} {port}"] = value
        totals: dict[str, float] = {}
        for name, rate in self._rates.of(counts, now_ns).items():
            metric = name.partition(" ")[0]
            totals[metric] = totals.get(metric, 0.0) + rate
        return [Reading(metric, rate) for metric, rate in totals.items()]

    def close(self) -> None:
        """Nothing is held."""


def rdma_counts(hardware: Mapping[str, int], data: Mapping[str, int]) -> dict[str, int]:
    """Counts of one port, by metric.

    Args:
        hardware: Its folder ``hw_counters``.
        data: Its folder ``counters``.
    """
    counts = {}
    again = [hardware[name] for name in RETRANSMITS if name in hardware]
    if again:
        counts["rdma_retransmits"] = sum(again)
    for metric, name in (("rdma_sent", "port_xmit_data"), ("rdma_received", "port_rcv_data")):
        if name in data:
            counts[metric] = data[name] * _WORD_BYTES
    return counts


def _numbers(folder: Path) -> dict[str, int]:
    found = {}
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError, ValueError):  # "N/A (no PMA)", a folder
                found[path.name] = int(path.read_text())
    return found
