"""How a run is watched, and where its figures go."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.config.checks import check_count, check_flags, check_local, check_range
from lightning_dist.errors import CombinationError, ConfigError

_PORTS = 65535


@dataclass(frozen=True)
class MonitorConfig:
    """How a run is watched, and where its figures go.

    Attributes:
        enabled: Record each step of each rank, sample its machine, and say at the end what bounds the step's time.
        folder: Where each rank writes its files; ``None`` means ``monitor`` in the run's own folder.
        spans_every: Of each how many-th step the whole timeline is kept, for pictures.
        interval_s: Between two samples of the machine, in seconds.
        heartbeat_s: Between two beats of a rank, in seconds.
        heartbeat_timeout_s: A rank without a beat for so long is counted and named, in seconds; nothing is killed.
        loggers: Means of each logging interval go to the Trainer's loggers as ``monitor/...``, of rank 0.
        report: Write ``report.html`` beside the run's files at its end.
        history: Folder that keeps a small record of each run, for ``hierdist compare`` and ``hierdist history``;
            ``None``: no record is kept.
        prometheus_port: Port on which a host's first rank serves its figures to Prometheus, its other ranks on the
            ones after it; ``None``: nothing is served.
        prometheus_host: Address to listen on; other machines do not reach the default.
    """

    enabled: bool = True
    folder: str | None = None
    spans_every: int = 100
    interval_s: float = 1.0
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 15.0
    loggers: bool = True
    report: bool = True
    history: str | None = "outputs/history"
    prometheus_port: int | None = None
    prometheus_host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        check_flags("monitor", self)
        check_local("monitor.folder", self.folder)
        check_local("monitor.history", self.history)
        check_count("monitor.spans_every", self.spans_every, low=1, unit="steps")
        check_range("monitor.interval_s", self.interval_s, low=0.05, unit="seconds")
        check_range("monitor.heartbeat_s", self.heartbeat_s, low=0.05, unit="seconds")
        check_range("monitor.heartbeat_timeout_s", self.heartbeat_timeout_s, low=0.05, unit="seconds")
        if self.heartbeat_timeout_s < 3 * self.heartbeat_s:
            raise CombinationError(
                f"monitor.heartbeat_timeout_s={self.heartbeat_timeout_s:g} is less than three beats of "
                f"monitor.heartbeat_s={self.heartbeat_s:g}: raise the one or lower the other"
            )
        if self.prometheus_port is not None:
            check_count("monitor.prometheus_port", self.prometheus_port, low=1, high=_PORTS, unit="(a port)")
        elif self.prometheus_host != MonitorConfig.prometheus_host:
            raise CombinationError(
                f"monitor.prometheus_host={self.prometheus_host} without monitor.prometheus_port serves nothing: give "
                "a port, e.g. 9400"
            )
        if not self.prometheus_host:
            raise ConfigError("monitor.prometheus_host is empty: write an address, or 0.0.0.0 for all")


MONITOR_PRESETS: dict[str, MonitorConfig] = {"on": MonitorConfig(), "off": MonitorConfig(enabled=False)}
