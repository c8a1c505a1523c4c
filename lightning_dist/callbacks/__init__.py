"""The callbacks a user adds, one a file; thin."""

from lightning_dist.callbacks.checkpoint import AsyncShardedCheckpoint
from lightning_dist.callbacks.cluster_monitor import ClusterMonitor
from lightning_dist.callbacks.pipeline_picture import PipelinePicture
from lightning_dist.callbacks.step_timeline import StepTimeline

__all__ = ["AsyncShardedCheckpoint", "ClusterMonitor", "PipelinePicture", "StepTimeline"]
