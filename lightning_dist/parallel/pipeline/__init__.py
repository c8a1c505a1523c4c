"""Pipeline stages: neighbouring layers of a model on different ranks, through which a batch goes in micro-batches."""

from lightning_dist.parallel.pipeline.layers import LayeredModel, PipelineLayer, find_layers
from lightning_dist.parallel.pipeline.links import StageLinks
from lightning_dist.parallel.pipeline.staged_model import StagedModel

__all__ = ["LayeredModel", "PipelineLayer", "StageLinks", "StagedModel", "find_layers"]
