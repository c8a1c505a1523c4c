"""Dense gradients: each bucket of DistributedDataParallel's reducer is averaged over all ranks, leg by leg.

The reducer calls the hook when a bucket's gradients are complete, in the same order on every rank; the hook hands the
bucket to the lanes and returns at once, so the network works while backward goes on. The mean is over ranks: the sum is
taken, then divided by the number of ranks. Sparse buckets go to a lane of their own.

Note: no postponed annotations in this file; the reducer compares the hook's with its own types.
"""

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.comm.hierarchical import HierarchicalAllReduce
from lightning_dist.gradsync.sparse import SparseAverage


class AllReduceScheme:
    """The comm hook. Works on CPU as on CUDA.

    Args:
        all_reduce: How a dense bucket travels.
        sparse: How a sparse bucket travels; ``None`` if the module has none.
    """

    def __init__(self, all_reduce: HierarchicalAllReduce, sparse: SparseAverage | None = None) -> None:
        self._all_reduce = all_reduce
        self._sparse = sparse

    def attach(self, module: DistributedDataParallel) -> None:
        """Let the module's reducer call :meth:`hook`; once for each module."""
        module.register_comm_hook(state=None, hook=self.hook)

    def hook(self, state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """Begin to average one bucket.

        Args:
            state: Unused; the scheme is its own state.
            bucket: [n] gradients of some parameters, one type; or one parameter's sparse gradient.

        Returns:
            A future of the averaged buffer, which is the bucket's own.
        """
        del state
        gradients = bucket.buffer()
        if gradients.is_sparse:
            assert self._sparse is not None, "modules with sparse gradients are known before"
            return self._sparse.start(gradients, bucket.parameters()[0])
        return self._all_reduce.start(gradients, mean=True, attributes={"bucket": bucket.index()})
