"""Sparse gradients: only the rows that some rank touched travel.

An ``nn.Embedding(sparse=True)`` gives its reducer a bucket of its own that holds a sparse tensor. Its rows are gathered
and summed by the backend over the world, on a lane and a group of its own, so that its order is that of the buckets.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from lightning_dist.comm.collectives import Collectives
from lightning_dist.comm.groups import destroy, make_group
from lightning_dist.comm.lanes import ThreadPipeline
from lightning_dist.comm.signatures import SignatureCheck


def has_sparse_gradients(module: nn.Module) -> bool:
    """Whether the reducer will hand over sparse buckets for this module."""
    return any(isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse for m in module.modules())


class SparseAllReduce:
    """Averages sparse tensors over all ranks, in the order of submission; every rank makes it.

    Args:
        collectives: The seam.
        world_size: Number of ranks.
        store: Shared by all ranks, its keys used by nobody else.
    """

    def __init__(self, collectives: Collectives, world_size: int, store: dist.Store) -> None:
        self._collectives = collectives
        self._world_size = world_size
        self._group = make_group(
            range(world_size),
            rank=collectives.rank,
            label="sparse",
            tier="world",
            timeout_s=collectives.timeout_s,
        )
        self._pipeline = ThreadPipeline(["sparse"])
        self._signatures = SignatureCheck(store, collectives=collectives, ranks=range(world_size))

    def start(self, tensor: torch.Tensor) -> Future[torch.Tensor]:
        """Begin to average a sparse COO tensor; every rank calls it in the same order, each with rows of its own.

        Returns:
            A future of the mean, coalesced.
        """
        self._signatures.check(f"rows of {tuple(tensor.shape)} {tensor.dtype}", operation="all_reduce")
        on_cuda = tensor.is_cuda
        future: Future[torch.Tensor] = Future(devices=[tensor.device]) if on_cuda else Future()
        mean = tensor.coalesce()

        def average() -> None:
            assert self._group is not None, "every rank is in it"
            self._collectives.all_reduce(mean, self._group)
            mean.div_(self._world_size)

        if on_cuda:  # enqueues on the caller's stream, and so in order
            average()
            future.set_result(mean)
            return future
        self._pipeline.submit([average], done=lambda: future.set_result(mean), failed=lambda e: _fail(future, e))
        return future

    def close(self, timeout_s: float = 5.0) -> None:
        """End the lane and release the group. Safe to call twice."""
        self._pipeline.close(timeout_s)
        if self._group is not None:
            destroy([self._group])
        self._group = None


def _fail(future: Future[torch.Tensor], error: BaseException) -> None:
    future.set_exception(error)  # type: ignore[arg-type]  # annotated as Exception; any is carried
