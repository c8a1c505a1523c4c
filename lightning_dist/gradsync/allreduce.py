"""Dense gradients: each bucket of DistributedDataParallel's reducer is averaged over all ranks, leg by leg.

The reducer calls the hook when a bucket's gradients are complete, in the same order on every rank; the hook hands the bucket to
the lanes and returns at once, so the network works while backward goes on. The mean is over ranks: the sum is taken, then
divided by the number of ranks.

Note: no postponed annotations in this file; the reducer compares the hook's with its own types.
"""

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.comm.hierarchical import HierarchicalAllReduce


class AllReduceScheme:
    """The comm hook. Works on CPU as on CUDA.

    Args:
        all_reduce: How a bucket travels.
    """

    def __init__(self, all_reduce: HierarchicalAllReduce) -> None:
        self._all_reduce = all_reduce

    def attach(self, module: DistributedDataParallel) -> None:
        """Let the module's reducer call :meth:`hook`; once for each module."""
        module.register_comm_hook(state=None, hook=self.hook)

    def hook(self, state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """Begin to average one bucket.

        Args:
            state: Unused; the scheme is its own state.
            bucket: [n] gradients of some parameters, one type.

        Returns:
            A future of the averaged buffer, which is the bucket's own.
        """
        del state
        return self._all_reduce.start(bucket.buffer(), mean=True, attributes={"bucket": bucket.index()})
