"""Dense gradients: each bucket of DistributedDataParallel's reducer is averaged over all ranks, leg by leg.

The reducer calls the hook when a bucket's gradients are complete, in the same order on every rank; the hook hands the
bucket to the lanes and returns at once, so the network works while backward goes on. The mean is over ranks: the sum is
taken, then divided by the number of ranks. Sparse buckets go to a lane of their own.

Note: no postponed annotations in this file; the reducer compares the hook's with its own types.
"""

import torch
import torch.distributed as dist
from torch.futures import Future

from lightning_dist.comm.feedback import Account, Origin, Span
from lightning_dist.comm.hierarchical import HierarchicalAllReduce
from lightning_dist.gradsync.data_parallel import DataParallel
from lightning_dist.gradsync.sparse import SparseAverage
from lightning_dist.gradsync.unapplied import give_back


class AllReduceScheme:
    """The comm hook. Works on CPU as on CUDA.

    Args:
        all_reduce: How a dense bucket travels.
        sparse: How a sparse bucket travels; ``None`` if the module has none.
    """

    def __init__(self, all_reduce: HierarchicalAllReduce, sparse: SparseAverage | None = None) -> None:
        self._all_reduce = all_reduce
        self._sparse = sparse
        self._names: dict[torch.Tensor, str] = {}
        self._means: list[tuple[torch.Tensor, list[torch.Tensor]]] = []  # of this backward: buckets, whose they are

    def attach(self, module: DataParallel) -> None:
        """Let the module's reducer call :meth:`hook`; once for each module.

        Where a codec loses something, buckets stay as they are made first: what is encoded together then depends on the
        model only, and a run that goes on from a checkpoint encodes what it would have without a stop.
        """
        module.register_comm_hook(state=None, hook=self.hook)
        self._names = {parameter: name for name, parameter in module.module.named_parameters()}
        module.finish_backward = self.after_backward
        if self._all_reduce.feedback is not None and self._all_reduce.feedback.loses:
            module.keep_buckets()

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
        feedback = self._all_reduce.feedback
        account = None
        if feedback is not None and bucket.parameters()[0].is_complex():  # pairs of real values, which nobody counts
            account = Account(self._origin(bucket), is_exact=True)
        elif feedback is not None:
            account = feedback.enter(self._origin(bucket), gradients)
            self._means.append((gradients, bucket.parameters()))
        attributes = {"bucket": bucket.index()}
        return self._all_reduce.start(gradients, mean=True, attributes=attributes, account=account)

    def after_backward(self) -> None:
        """Take back what the codec made of gradients that no rank had, and what was owed of them: it is not applied."""
        feedback, means = self._all_reduce.feedback, self._means
        self._means = []
        if feedback is not None and self._all_reduce.is_first:
            give_back(feedback, means, self._names)

    def _origin(self, bucket: dist.GradBucket) -> Origin:
        spans = tuple(Span(self._names[p], 0, p.numel()) for p in bucket.parameters())
        return Origin(f"bucket {bucket.index()}", spans, 1 / self._all_reduce.world_size)
