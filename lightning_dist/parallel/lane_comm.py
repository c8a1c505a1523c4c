"""FSDP2's collectives on our lanes: gathers are waited for where their result is used, sums run beside backward.

FSDP2 (torch 2.13) calls an ``AllGather`` and a ``ReduceScatter`` for each of its parameter groups. Its own
reduce-scatter blocks backward on CPU, and over Gloo moves twice the bytes it must.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.futures import Future

from lightning_dist.comm.codecs import Codec
from lightning_dist.comm.scattered import HierarchicalScatter


class FutureWork(dist.Work):
    """A future that can be waited for as a backend's operation is; its error is raised as it is.

    Args:
        future: Done, or failed, by a lane.
    """

    def __init__(self, future: Future[torch.Tensor]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Wait for the lanes, which keep the deadline; on CUDA only the current stream waits."""
        self._future.wait()
        return True


class _Allocates:
    """Memory for both; every call gets its own, since several are under way at a time."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class LaneAllGather(_Allocates, AllGather):
    """Gathers parameters over the group FSDP2 names.

    Args:
        scatter_of: Process group that FSDP2 may name, and lanes over its ranks.
        name: Of what is gathered.
        codec: How values travel where they leave the host; ``None``: as they are.
    """

    def __init__(
        self,
        scatter_of: Iterable[tuple[dist.ProcessGroup, HierarchicalScatter]],
        *,
        name: str,
        codec: Codec | None = None,
    ) -> None:
        self._name = name
        self._codec = codec
        self._scatter_of = {group.group_name: scatter for group, scatter in scatter_of}

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """See FSDP2's ``AllGather``."""
        scatter = self._scatter_of[group.group_name]
        work = FutureWork(scatter.all_gather(output_tensor, input_tensor, name=self._name, codec=self._codec))
        if async_op:
            return work
        work.wait()
        return None


class LaneReduceScatter(_Allocates, ReduceScatter):
    """Hands a parameter group's gradients over; nothing is waited for here.

    Args:
        arrive: Called with the shard to fill, the gradients [group size x shard], and whether their mean is wanted and
            not their sum.
    """

    def __init__(self, arrive: Callable[[torch.Tensor, torch.Tensor, bool], None]) -> None:
        self._arrive = arrive

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """See FSDP2's ``ReduceScatter``."""
        self._arrive(output_tensor, input_tensor, op == dist.ReduceOp.AVG)
        return None
