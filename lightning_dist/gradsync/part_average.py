"""Gradients of parameters of which each rank holds a part: averaged over the ranks that hold the same parts.

DistributedDataParallel does not take DTensors. This does what its reducer does, on each gradient's local part: buckets
fill in the order in which a backward comes to their parameters, and a full one starts while backward goes on. A bucket
is summed by a hierarchical reduce-scatter and handed out by a hierarchical all-gather, the two legs of an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.utils.hooks import RemovableHandle

from lightning_dist.comm.feedback import Origin, Span
from lightning_dist.comm.scattered import HierarchicalScatter
from lightning_dist.errors import LateGradientError, UnusedParametersError

Vote = Callable[[Sequence[bool]], list[bool]]
"""Every rank says yes or no to some questions; the answer to each is yes if any rank's is. Collective."""

_SHOWN = 8


class _Bucket:
    """Parameters whose gradients travel together; all of one type."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        self.waiting: set[nn.Parameter] = set()
        self.is_started = False
        self.origin: Origin | None = None
        self.sum: Tensor | None = None  # [n], filled by the lanes


class PartAverage:
    """Averages gradients; every rank makes it, and runs backward, alike.

    The sequence of calls around a backward: :meth:`before_backward`, then :meth:`after_backward`, which may be called
    twice; inside :meth:`no_sync` gradients stay as they are for a later backward.

    Args:
        parameters: Name -> parameter; plain or spread.
        scatter: Lanes over the ranks that hold the same parts.
        bucket_bytes: Largest bucket, in bytes; a larger parameter gets one of its own.
        vote: How ranks learn which parameters any of them used; ``None``: each must use all.
        watches: Whether buckets start as a backward fills them; else all by :meth:`start`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        scatter: HierarchicalScatter,
        *,
        bucket_bytes: int,
        vote: Vote | None,
        watches: bool = True,
    ) -> None:
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._scatter = scatter
        self._size = len(scatter.members)
        self._bucket_bytes = bucket_bytes
        self._vote = vote
        self._watches = watches
        self._synchronises = True
        self._is_due = False
        self._trained: list[nn.Parameter] = []
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._handles: list[RemovableHandle] = []
        self._next = 0
        self._summing: list[Future[Tensor]] = []
        self._handing_out: list[Future[Tensor]] = []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are left for a later backward."""
        self._synchronises = False
        try:
            yield
        finally:
            self._synchronises = True

    def before_backward(self) -> None:
        """Get ready for the gradients of the parameters that want one now."""
        trained = [parameter for parameter in self._names if parameter.requires_grad]
        if len(trained) != len(self._trained) or any(a is not b for a, b in zip(trained, self._trained, strict=True)):
            self._fill(trained)
        self._next = 0
        self._is_due = True
        for bucket in self._buckets:
            bucket.waiting = set(bucket.parameters)
            bucket.is_started, bucket.sum = False, None

    def start(self) -> None:
        """All gradients are there: start what has not started."""
        self._start(all_that_are_left=True)

    def after_backward(self) -> None:
        """Wait for all sums and put them in place.

        Raises:
            UnusedParametersError: A parameter took no part, and nobody was to look for such.
        """
        if not (self._synchronises and self._is_due):
            return
        self._is_due = False
        used = [parameter.grad is not None for parameter in self._trained]
        wanted = used if self._vote is None else self._vote(used)
        self._start(all_that_are_left=True)
        while self._summing:
            self._summing.pop(0).wait()
        while self._handing_out:
            self._handing_out.pop(0).wait()
        stays_without = {p for p, want in zip(self._trained, wanted, strict=True) if not want}
        for bucket in self._buckets:
            self._put_back(bucket, stays_without)
        if self._vote is None and stays_without:
            names = [self._names[parameter] for parameter in self._trained if parameter in stays_without]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise UnusedParametersError(
                f"some parameters took no part in producing the loss that training_step returned: "
                f"{', '.join(names[:_SHOWN])}{more}. If that is intended, let them be found: "
                "parallel.find_unused_parameters=true, or HierDistStrategy(..., find_unused_parameters=True); or "
                "freeze them"
            )

    def release(self) -> None:
        """Let the parameters go."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._trained, self._buckets, self._bucket_of = [], [], [], {}

    def _fill(self, trained: list[nn.Parameter]) -> None:
        """Deal parameters to buckets, last ones first: backward comes to them first."""
        self.release()
        self._trained = trained
        open_buckets: dict[torch.dtype, list[nn.Parameter]] = {}
        held_bytes: dict[torch.dtype, int] = {}
        for parameter in reversed(trained):
            local = _local(parameter)
            size = local.numel() * local.element_size()
            filling = open_buckets.setdefault(parameter.dtype, [])
            if filling and held_bytes[parameter.dtype] + size > self._bucket_bytes:
                self._buckets.append(_Bucket(filling))
                filling = open_buckets[parameter.dtype] = []
                held_bytes[parameter.dtype] = 0
            filling.append(parameter)
            held_bytes[parameter.dtype] = held_bytes.get(parameter.dtype, 0) + size
        self._buckets += [_Bucket(filling) for filling in open_buckets.values()]
        if self._scatter.feedback is not None:
            self._trace()
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                self._bucket_of[parameter] = bucket
                if self._watches:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._arrive, bucket)))

    def _arrive(self, bucket: _Bucket, parameter: nn.Parameter) -> None:
        if not self._synchronises:
            return
        if bucket.is_started:
            raise LateGradientError(
                f"the gradient of {self._names[parameter]} changed after its bucket had begun to travel: two backward "
                "passes walk one graph. Give each its own forward"
            )
        bucket.waiting.discard(parameter)
        self._start()

    def _start(self, *, all_that_are_left: bool = False) -> None:
        """Start the buckets that are full, in their order, which is the same on all ranks."""
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.waiting and not all_that_are_left:
                return
            bucket.is_started = True
            self._send(bucket)
            self._next += 1

    @torch.no_grad()
    def _send(self, bucket: _Bucket) -> None:
        parts = [_local(p.grad) if p.grad is not None else torch.zeros_like(_local(p)) for p in bucket.parameters]
        filled = sum(part.numel() for part in parts)
        padding = -filled % self._size
        flat = torch.cat([*(part.reshape(-1) for part in parts), parts[0].new_zeros(padding)])
        shard = flat.new_empty(flat.numel() // self._size)
        total = bucket.sum = torch.empty_like(flat)

        feedback, origin = self._scatter.feedback, bucket.origin
        account = None if feedback is None or origin is None else feedback.enter(origin, flat)

        def hand_out() -> None:
            codec = None if account is None else self._scatter.codec
            self._handing_out.append(self._scatter.all_gather(total, shard, codec=codec, account=account))

        self._summing.append(self._scatter.reduce_scatter(shard, flat, mean=True, then=hand_out, account=account))

    def _trace(self) -> None:
        """Say of each bucket what it is made of: of whole parameters, since codecs do not go with split ones."""
        for bucket in self._buckets:
            spans = [Span(self._names[p], 0, p.numel()) for p in bucket.parameters]
            padding = -sum(span.length for span in spans) % self._size
            key = f"bucket of {self._names[bucket.parameters[0]]}"
            bucket.origin = Origin(key, (*spans, Span(None, 0, padding)), 1 / self._size)

    @torch.no_grad()
    def _put_back(self, bucket: _Bucket, stays_without: set[nn.Parameter]) -> None:
        assert bucket.sum is not None, "all have been sent"
        offset = 0
        for parameter in bucket.parameters:
            local = _local(parameter)
            mean = bucket.sum[offset : offset + local.numel()].view(local.shape)
            offset += local.numel()
            if parameter in stays_without:
                self._give_back(parameter, mean)
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            _local(parameter.grad).copy_(mean)
        bucket.sum = None

    def _give_back(self, parameter: nn.Parameter, mean: Tensor) -> None:
        """What a codec made of a gradient that no rank had, and what was owed of it, is not applied."""
        feedback = self._scatter.feedback
        if feedback is not None and self._scatter.index == 0:
            feedback.give_back(self._names[parameter], 0, mean.reshape(-1))


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
