"""From when on a host is not fit to train."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.config.checks import check_range
from lightning_dist.elastic.leading.load import MOST_BYTES


@dataclass(frozen=True)
class HealthLimits:
    """All thresholds of the check; generous ones: it is to find hosts that would spoil a run, not slower ones.

    Attributes:
        deadline_s: The whole check ends within so many seconds, or the host is not fit.
        memory_free_bytes: Memory that must be left for training.
        memory_tested_bytes: Memory that is written and read back.
        disk_free_bytes: Room that each folder must have.
        disk_tested_bytes: Bytes that are written to each folder, made durable and read back.
        disk_bytes_per_s: So written, at least.
        link_timeout_s: A peer must answer within so many seconds.
        link_latency_s: Half a round trip, the median of several, at most.
        link_lost_share: Of several connections to a peer, at most so many may have lost packets while they were opened.
        link_tested_bytes: Bytes that are sent to another agent, and by it, where one answers.
        link_bytes_per_s: So sent, at least, in each direction.
        compute_s: Seconds spent on products, over all cores that the host may use.
        slow_factor: A host whose cores or GPUs compute so many times slower than they have, or than those of the
            other hosts in the median, is not fit.
    """

    deadline_s: float = 10.0
    memory_free_bytes: int = 256 << 20
    memory_tested_bytes: int = 32 << 20
    disk_free_bytes: int = 256 << 20
    disk_tested_bytes: int = 4 << 20
    disk_bytes_per_s: float = 500e3
    link_timeout_s: float = 3.0
    link_latency_s: float = 0.25
    link_lost_share: float = 0.2
    link_tested_bytes: int = 512 << 10
    link_bytes_per_s: float = 500e3
    compute_s: float = 0.3
    slow_factor: float = 5.0

    def __post_init__(self) -> None:
        check_range("health.deadline_s", self.deadline_s, low=0.01, unit="seconds")
        check_range("health.link_timeout_s", self.link_timeout_s, low=0.01, unit="seconds")
        check_range("health.compute_s", self.compute_s, low=0.01, unit="seconds")
        check_range("health.link_lost_share", self.link_lost_share, low=0, high=1, unit="of the connections")
        check_range("health.link_tested_bytes", self.link_tested_bytes, low=1, high=MOST_BYTES, unit="bytes")
        check_range("health.slow_factor", self.slow_factor, low=1.1, unit="times")
        for name in (
            "memory_free_bytes",
            "memory_tested_bytes",
            "disk_free_bytes",
            "disk_tested_bytes",
            "disk_bytes_per_s",
            "link_bytes_per_s",
        ):
            check_range(f"health.{name}", getattr(self, name), low=0, unit="bytes")
