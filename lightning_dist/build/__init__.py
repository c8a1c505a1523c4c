"""The only place where a config becomes objects that talk to other ranks."""

from lightning_dist.build.gradients import (
    describe,
    open_gradient_all_reduce,
    open_sparse_all_reduce,
    wrap_data_parallel,
)
from lightning_dist.build.recompute import open_recomputation
from lightning_dist.build.run import RunContext, open_agreement, open_run
from lightning_dist.build.shards import describe_shards, open_shard_links, shard_model

__all__ = [
    "RunContext",
    "describe",
    "describe_shards",
    "open_agreement",
    "open_gradient_all_reduce",
    "open_recomputation",
    "open_run",
    "open_shard_links",
    "open_sparse_all_reduce",
    "shard_model",
    "wrap_data_parallel",
]
