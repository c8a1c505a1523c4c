"""The only place where a config becomes objects that talk to other ranks."""

from lightning_dist.build.checkpoints import CheckpointSaver, Saved, SaveStarted, open_checkpoint_saver
from lightning_dist.build.data import layout_of, replicas_of
from lightning_dist.build.feedback import can_take_over, handed_on, low_rank_feedback_of
from lightning_dist.build.gradients import (
    describe,
    open_gradient_all_reduce,
    open_sparse_average,
    wrap_data_parallel,
)
from lightning_dist.build.host_reading import open_host_reading
from lightning_dist.build.local_sgd import (
    describe_local_sgd,
    exactly,
    local_sgd_of,
    open_outer_lanes,
    open_shard_links_inside,
    open_worker_gradients,
    workers_of,
)
from lightning_dist.build.pipeline import (
    average_stages,
    cut_into_stages,
    describe_boundaries,
    describe_stages,
    needless_crossings,
    open_stage_links,
    pipeline_size,
)
from lightning_dist.build.recompute import open_recomputation
from lightning_dist.build.replicas import Kept, find_kept, find_own_kept
from lightning_dist.build.row_links import RowLinks, open_row_links
from lightning_dist.build.run import RunContext, open_agreement, open_run
from lightning_dist.build.shards import describe_shards, open_shard_links, shard_model
from lightning_dist.build.shares import to_read
from lightning_dist.build.stage_shards import open_stage_shard_links, shard_stages
from lightning_dist.build.tables import TableService, describe_tables, open_tables
from lightning_dist.build.tensor import (
    average_parts,
    describe_split,
    open_tensor_links,
    place_ranks,
    split_module,
)

__all__ = [
    "CheckpointSaver",
    "Kept",
    "RowLinks",
    "RunContext",
    "SaveStarted",
    "Saved",
    "TableService",
    "average_parts",
    "average_stages",
    "can_take_over",
    "cut_into_stages",
    "describe",
    "describe_boundaries",
    "describe_local_sgd",
    "exactly",
    "local_sgd_of",
    "open_outer_lanes",
    "open_shard_links_inside",
    "open_worker_gradients",
    "workers_of",
    "describe_shards",
    "describe_stages",
    "describe_tables",
    "describe_split",
    "find_kept",
    "find_own_kept",
    "needless_crossings",
    "open_agreement",
    "open_checkpoint_saver",
    "handed_on",
    "low_rank_feedback_of",
    "open_gradient_all_reduce",
    "open_host_reading",
    "open_recomputation",
    "open_row_links",
    "open_run",
    "open_shard_links",
    "open_sparse_average",
    "open_stage_links",
    "open_stage_shard_links",
    "open_tables",
    "open_tensor_links",
    "pipeline_size",
    "place_ranks",
    "layout_of",
    "replicas_of",
    "shard_model",
    "shard_stages",
    "split_module",
    "to_read",
    "wrap_data_parallel",
]
