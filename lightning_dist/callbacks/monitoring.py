"""The callbacks that a ``monitor`` config stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

from lightning_dist.callbacks.cluster_monitor import ClusterMonitor
from lightning_dist.callbacks.monitor_outputs import MonitorOutputs
from lightning_dist.callbacks.step_timeline import StepTimeline
from lightning_dist.config import MONITOR_PRESETS, MonitorConfig, resolve


def monitor_callbacks(monitor: str | Mapping[str, Any] | MonitorConfig = "on") -> list[pl.Callback]:
    """What watches a run, for ``Trainer(callbacks=monitor_callbacks())``: a timeline, a monitor, and their outputs.

    Args:
        monitor: ``"on"``, ``"off"``, a mapping of options, or a :class:`~lightning_dist.config.MonitorConfig`.

    Raises:
        ConfigError: An option is unknown or out of range, or a package that it needs is missing.
    """
    config = resolve("monitor", monitor, MonitorConfig, MONITOR_PRESETS)
    if not config.enabled:
        return []
    return [
        StepTimeline(config.folder, spans_every=config.spans_every),
        ClusterMonitor(
            config.folder,
            interval_s=config.interval_s,
            heartbeat_s=config.heartbeat_s,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
        ),
        MonitorOutputs(
            loggers=config.loggers,
            report=config.report,
            history=config.history,
            prometheus_port=config.prometheus_port,
            prometheus_host=config.prometheus_host,
        ),
    ]
