"""Who sits where, and what the links measure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_dist.config.checks import check_choice, check_range
from lightning_dist.errors import ConfigError

TIER_CHOICES = ("auto", "flat", "two_tier", "three_tier")


@dataclass(frozen=True)
class ProbeConfig:
    """Measuring the links at start-up.

    Attributes:
        enabled: Measure bandwidth and latency of each tier once the groups exist. Off by default.
        budget_s: Longest time the probe may take, in seconds (at most 2).
        cache_dir: Folder in which results are kept, one file a cluster; ``None`` means the user's cache folder.
        refresh: Measure again although the cache has this cluster.
    """

    enabled: bool = False
    budget_s: float = 1.5
    cache_dir: str | None = None
    refresh: bool = False

    def __post_init__(self) -> None:
        check_range("topology.probe.budget_s", self.budget_s, low=0.1, high=2.0, unit="seconds")


@dataclass(frozen=True)
class TopologyConfig:
    """Who sits where.

    Attributes:
        tiers: ``auto`` (three tiers if switches are known, else two), ``flat`` (every rank its own host: no
            hierarchy), ``two_tier`` (hosts), ``three_tier`` (hosts under switches; ``switches`` is then required).
        host: Name of this process's host; ``None`` means it is discovered.
        hosts: Host name -> its ranks, to state the whole placement by hand; ``None`` means it is discovered.
        switches: Switch name -> its hosts; ``None`` means no third tier is known.
        probe: Whether and how the links are measured.
    """

    tiers: str = "auto"
    host: str | None = None
    hosts: dict[str, list[int]] | None = None
    switches: dict[str, list[str]] | None = None
    probe: ProbeConfig = field(default_factory=ProbeConfig)

    def __post_init__(self) -> None:
        check_choice("topology.tiers", self.tiers, TIER_CHOICES)
        if self.tiers == "three_tier" and not self.switches:
            raise ConfigError(
                "topology.tiers=three_tier needs topology.switches, a mapping of switch name to its hosts, "
                "e.g. topology.switches={rack1: [a, b], rack2: [c, d]}; write topology.tiers=two_tier without it"
            )


TOPOLOGY_PRESETS: dict[str, TopologyConfig | dict[str, Any]] = {
    "auto": TopologyConfig(),
    "flat": TopologyConfig(tiers="flat"),
    "two_tier": TopologyConfig(tiers="two_tier"),
    "three_tier": {"tiers": "three_tier"},  # needs switches
}
