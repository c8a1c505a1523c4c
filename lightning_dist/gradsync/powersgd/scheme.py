"""The comm hook: matrices travel as two thin factors, the rest as it is, all by the hierarchical all-reduce.

A bucket's first factors and what stays exact go in one tensor, while backward goes on. When the last bucket comes, the
second factors of all buckets go in another one. So a step waits twice for the network, however many buckets there are,
and all ranks send in the same order.

What the products leave out is added to this rank's next gradient. Sums are linear: the products stand for the mean of
gradients and of what is owed, so that nothing is lost.

Note: no postponed annotations in this file; the reducer compares the hook's with its own types.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.futures import Future

from lightning_dist.comm.feedback import Account
from lightning_dist.comm.hierarchical import HierarchicalAllReduce
from lightning_dist.gradsync.data_parallel import DataParallel
from lightning_dist.gradsync.powersgd.factors import Shape, as_good, matrix_of, orthonormal
from lightning_dist.gradsync.powersgd.state import LowRankFeedback, owe, owed, settle
from lightning_dist.gradsync.sparse import SparseAverage
from lightning_dist.gradsync.unapplied import give_back


@dataclass
class _Part:
    """One parameter's gradient on its way.

    Attributes:
        name: Of the parameter.
        gradient: [n] in the bucket's buffer.
        account: What is owed of it.
        shape: Of the matrix; ``None``: it stays exact.
        values: [rows, columns] with what is owed.
        first: The mean first factor, orthonormal.
        second: This rank's second factor, then the mean.
        is_good: [] bool, whether all is finite.
    """

    name: str
    gradient: torch.Tensor
    account: Account
    shape: Shape | None = None
    values: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    first: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    second: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    is_good: torch.Tensor = field(default_factory=lambda: torch.tensor(True))


@dataclass
class _Sent:
    """A bucket under way.

    Attributes:
        buffer: The bucket's.
        parts: In the order of what was sent.
        mean: Of what was sent.
        done: What the reducer waits for.
    """

    buffer: torch.Tensor
    parts: list[_Part]
    mean: Future[torch.Tensor]
    done: Future[torch.Tensor]


class PowerSGDScheme:
    """The comm hook. Works on CPU as on CUDA.

    Args:
        all_reduce: How factors, and what stays exact, travel.
        feedback: What is kept from step to step; it outlives the wrapped module.
        sparse: How a sparse bucket travels; ``None`` if the module has none.
    """

    def __init__(
        self, all_reduce: HierarchicalAllReduce, feedback: LowRankFeedback, sparse: SparseAverage | None = None
    ) -> None:
        self._all_reduce = all_reduce
        self._feedback = feedback
        self._sparse = sparse
        self._names: dict[torch.Tensor, str] = {}
        self._under_way: list[_Sent] = []
        self._means: list[tuple[torch.Tensor, list[torch.Tensor]]] = []  # of this backward

    def attach(self, module: DataParallel) -> None:
        """Let the module's reducer call :meth:`hook`; once for each module."""
        self._names = {parameter: name for name, parameter in module.module.named_parameters()}
        module.register_comm_hook(state=None, hook=self.hook)
        module.finish_backward = self.after_backward

    def hook(self, state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """Begin to average one bucket; the last one of a backward ends them all.

        Args:
            state: Unused; the scheme is its own state.
            bucket: [n] gradients of some parameters, one type; or one parameter's sparse gradient.

        Returns:
            A future of the averaged buffer, which is the bucket's own.
        """
        del state
        if bucket.index() == 0:
            self._under_way.clear()  # of a backward that failed
            self._means.clear()
        with torch.no_grad():
            future = self._start(bucket)
            if bucket.is_last():
                self._finish()
        return future

    def after_backward(self) -> None:
        """Take back what was made of gradients that no rank had."""
        means, self._means = self._means, []
        if self._all_reduce.is_first:
            give_back(self._feedback, means, self._names)

    def _start(self, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        buffer = bucket.buffer()
        if buffer.is_sparse:
            assert self._sparse is not None, "modules with sparse gradients are known before"
            return self._sparse.start(buffer, bucket.parameters()[0])
        if bucket.parameters()[0].is_complex():  # pairs of real values
            return self._all_reduce.start(buffer, mean=True, attributes={"bucket": bucket.index()})
        self._means.append((buffer, bucket.parameters()))
        parts = self._parts(bucket)
        if all(part.shape is None for part in parts):
            return self._all_reduce.start(buffer, mean=True, attributes={"bucket": bucket.index()})
        kind = torch.promote_types(buffer.dtype, torch.float32)
        sent = torch.cat([_first(part, self._feedback, kind).reshape(-1) for part in parts])
        mean = self._all_reduce.start(sent, mean=True, attributes={"bucket": bucket.index()})
        done: Future[torch.Tensor] = Future(devices=[buffer.device]) if buffer.is_cuda else Future()
        self._under_way.append(_Sent(buffer, parts, mean, done))
        return done

    def _parts(self, bucket: dist.GradBucket) -> list[_Part]:
        parts, position = [], 0
        for parameter in bucket.parameters():
            name, size = self._names[parameter], parameter.numel()
            gradient = bucket.buffer()[position : position + size]
            position += size
            account = self._feedback.enter_parameter(name, gradient)
            travels = not account.is_exact and gradient.is_floating_point()
            shape = matrix_of(parameter.shape, self._feedback.columns) if travels else None
            if shape is None:
                _settle_exactly(account, gradient)
            parts.append(_Part(name, gradient, account, shape))
        return parts

    def _finish(self) -> None:
        under_way, self._under_way = self._under_way, []
        if not under_way:
            return
        matrices = []
        for sent in under_way:
            _take_first(sent)
            matrices += [part for part in sent.parts if part.shape is not None]
        kind = max((part.second.dtype for part in matrices), key=lambda dtype: dtype.itemsize)
        sizes = [part.second.numel() for part in matrices]
        mean = self._all_reduce.start(torch.cat([part.second.reshape(-1).to(kind) for part in matrices]), mean=True)
        for part, second in zip(matrices, mean.wait().split(sizes), strict=True):
            _put_product(part, second.view_as(part.second).to(part.second.dtype), self._feedback)
        for sent in under_way:
            sent.done.set_result(sent.buffer)


def _settle_exactly(account: Account, gradient: torch.Tensor) -> None:
    """What is owed of it goes with it, and nothing is owed afterwards."""
    left = owed(account)
    if left is not None:
        gradient.add_(left.to(gradient.dtype))
        settle(account)


def _first(part: _Part, feedback: LowRankFeedback, kind: torch.dtype) -> torch.Tensor:
    """What is sent of a parameter: its matrix times the factor it begins with, or itself."""
    if part.shape is None:
        return part.gradient.to(kind)
    left = owed(part.account)
    values = part.gradient.to(kind)
    part.values = (values if left is None else values + left).view(part.shape)
    part.second = feedback.factor(part.name, part.shape.columns, values.device, window=part.account.window).to(kind)
    return part.values @ part.second


def _take_first(sent: _Sent) -> None:
    """Wait for a bucket's means: put in place what is exact, make second factors."""
    mean = sent.mean.wait()
    position = 0
    for part in sent.parts:
        if part.shape is None:
            size = part.gradient.numel()
            part.gradient.copy_(mean[position : position + size])
        else:
            columns = part.second.shape[1]
            size = part.shape.rows * columns
            first = mean[position : position + size].view(part.shape.rows, columns)
            part.is_good = as_good(first)
            part.first = orthonormal(torch.where(part.is_good, first, 0))
            part.second = part.values.T @ part.first
        position += size


def _put_product(part: _Part, second: torch.Tensor, feedback: LowRankFeedback) -> None:
    """The product is the gradient; what it leaves out is owed. Where all is not finite, nothing is, and NaN is said."""
    product = part.first @ second.T
    lost = torch.where(part.is_good, part.values - product, 0)
    owe(part.account, lost.reshape(-1).float())
    before = feedback.factor(part.name, second.shape[0], second.device, window=part.account.window)
    feedback.keep_factor(part.name, torch.where(part.is_good, second.float(), before))
    part.gradient.copy_(torch.where(part.is_good, product, torch.nan).reshape(-1))
