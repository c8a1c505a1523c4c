"""The callbacks a user adds, one a file; thin."""

from lightning_dist.callbacks.checkpoint import AsyncShardedCheckpoint
from lightning_dist.callbacks.cluster_monitor import ClusterMonitor
from lightning_dist.callbacks.monitor_outputs import MonitorOutputs
from lightning_dist.callbacks.monitoring import monitor_callbacks
from lightning_dist.callbacks.pipeline_picture import PipelinePicture
from lightning_dist.callbacks.step_timeline import StepTimeline
from lightning_dist.heartbeat import Heartbeat

__all__ = [
    "AsyncShardedCheckpoint",
    "ClusterMonitor",
    "Heartbeat",
    "MonitorOutputs",
    "PipelinePicture",
    "StepTimeline",
    "monitor_callbacks",
]
