"""Hierarchical all-reduce: legs in a row, chunks in a pipeline.

The tensor is cut into chunks. Each chunk is reduced inside the host, crosses between hosts, and is gathered inside the
host; while one chunk crosses, the next is being reduced and the one before gathered. The legs and their lanes are
chosen once (:mod:`~lightning_dist.comm.opening`); after that every tensor goes the same way, so that all ranks are in
the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.futures import Future

from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.comm.feedback import Account, Feedback
from lightning_dist.comm.groups import destroy
from lightning_dist.comm.lanes import Pipeline, StreamPipeline, ThreadPipeline
from lightning_dist.comm.legs import Chunk, ChunkStep, Leg, NamedStep, keep_for_current_stream
from lightning_dist.comm.signatures import SignatureCheck, WatchedFuture, amount_of
from lightning_dist.errors import CollectiveError


class HierarchicalAllReduce:
    """Sums over all ranks, leg by leg, in the order of submission. Made by :mod:`~lightning_dist.comm.opening`.

    Args:
        legs: From inside to outside; the last may be a top leg, which has no way down.
        groups: Process groups to release at the end.
        collectives: The seam.
        chunk_bytes: Largest chunk, in bytes.
        device: Where the tensors live.
        world_size: Number of ranks, by which a mean divides.
        is_first: Whether this is the first of them.
        signatures: Makes sure that ranks ask for the same.
        feedback: What is owed of what is sent; ``None``: nothing is lost on the way.
    """

    def __init__(
        self,
        legs: Sequence[Leg],
        groups: Sequence[RankGroup],
        *,
        collectives: Collectives,
        chunk_bytes: int,
        device: torch.device,
        world_size: int,
        is_first: bool,
        signatures: SignatureCheck | None = None,
        feedback: Feedback | None = None,
    ) -> None:
        self.feedback = feedback
        self._signatures = signatures
        self._legs = tuple(legs)
        self._groups = tuple(groups)
        self._collectives = collectives
        self._chunk_bytes = chunk_bytes
        self._device = device
        self._world_size = world_size
        self._is_first = is_first
        self._sequence = 0
        self._steps = _row_of_lanes(self._legs)
        names = [step.lane for step in self._steps]
        self._pipeline: Pipeline = (
            StreamPipeline(names, device)
            if device.type == "cuda"
            else ThreadPipeline(names, on_failure=lambda error: self.abort(str(error)))
        )

    @property
    def world_size(self) -> int:
        """Number of ranks that take part."""
        return self._world_size

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of those that take part."""
        return self._is_first

    @property
    def lanes(self) -> tuple[str, ...]:
        """Names of the lanes, in order."""
        return tuple(step.lane for step in self._steps)

    @property
    def description(self) -> str:
        """The legs in words, from inside to outside."""
        return "; then ".join(leg.description for leg in self._legs)

    def start(
        self,
        tensor: torch.Tensor,
        *,
        mean: bool = False,
        attributes: dict[str, int] | None = None,
        account: Account | None = None,
    ) -> Future[torch.Tensor]:
        """Begin to reduce ``tensor`` in place; every rank calls it, in the same order, with the same shape and dtype.

        Args:
            tensor: Any shape, 0-dim and empty included, contiguous or not. Bool is combined by "or".
            mean: Divide the sum by the number of ranks; floating and complex types only.
            attributes: What the events should say, e.g. ``{"bucket": 3}``.
            account: Of :meth:`Feedback.enter`, where what is lost of the tensor is kept.

        Returns:
            A future of ``tensor``; it fails with a :class:`~lightning_dist.errors.CollectiveError`. On CUDA the
            future's ``wait`` makes the current stream wait.
        """
        future: Future[torch.Tensor] = (
            Future(devices=[self._device]) if self._device.type == "cuda" else WatchedFuture(self._collectives.events)
        )
        if self._signatures is not None and self._world_size > 1:
            try:
                asked = f"the {'mean' if mean else 'sum'} of {amount_of(tensor)}"
                self._signatures.check(asked, operation="all_reduce")
            except CollectiveError as error:
                self.abort(str(error))
                raise
        flat, is_copy = _flat(tensor)
        if flat.numel() == 0 or self._world_size == 1:
            future.set_result(tensor)
            return future
        columns = max(1, self._chunk_bytes // flat.element_size())
        pieces = flat.split(columns)
        for index, piece in enumerate(pieces):
            chunk = Chunk(
                piece,
                sequence=self._sequence,
                maximum=tensor.dtype is torch.bool,
                scale=1.0 / self._world_size if mean else None,
                scale_first=tensor.dtype is torch.float16,
                attributes={**(attributes or {}), "chunk": index},
                start=index * columns,
                account=account,
            )
            self._sequence += 1
            is_last = index == len(pieces) - 1
            self._submit(chunk, future, tensor, flat if is_copy else None, is_last)
        return future

    def all_reduce(self, tensor: torch.Tensor, *, mean: bool = False) -> torch.Tensor:
        """:meth:`start`, waited for."""
        return self.start(tensor, mean=mean).wait()

    def abort(self, reason: str) -> None:
        """Free everyone who waits in a leg, here and, where they can be told, at the peers."""
        for leg in self._legs:
            leg.abort(reason)

    def close(self, timeout_s: float = 5.0) -> None:
        """End lanes, shared memory and groups. Safe to call twice."""
        self._pipeline.close(timeout_s)
        for leg in self._legs:
            leg.close()
        destroy(self._groups)
        self._groups = ()

    def _submit(
        self,
        chunk: Chunk,
        future: Future[torch.Tensor],
        tensor: torch.Tensor,
        copy: torch.Tensor | None,
        is_last: bool,
    ) -> None:
        def done() -> None:
            if is_last:
                if copy is not None:
                    keep_for_current_stream(copy)
                    tensor.copy_(copy.view(tensor.dtype).view(tensor.shape))
                future.set_result(tensor)

        def failed(error: BaseException) -> None:
            if is_last:
                future.set_exception(error)  # type: ignore[arg-type]  # annotated for any T, takes an exception

        self._pipeline.submit([_bind(step.run, chunk) for step in self._steps], done=done, failed=failed)


def _bind(step: ChunkStep, chunk: Chunk) -> Any:
    return lambda: step(chunk)


def _flat(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """[n] of a type that can be summed, sharing memory with ``tensor`` if it can; and whether it is a copy."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if values.dtype is torch.bool:
        values = values.view(torch.uint8) if values.is_contiguous() else values.contiguous().view(torch.uint8)
    contiguous = values.contiguous()
    return contiguous.view(-1), contiguous.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous()


def _row_of_lanes(legs: Sequence[Leg]) -> list[NamedStep]:
    """All steps from the first to the last; the step that waits for the top is joined with the first way down."""
    steps = [step for leg in legs for step in leg.up]
    down = [step for leg in reversed(legs) for step in leg.down]
    if steps and down and steps[-1].lane == "finish":
        finish, first = steps.pop().run, down[0]

        def finish_and_gather(chunk: Chunk) -> None:
            finish(chunk)
            first.run(chunk)

        down[0] = NamedStep(first.lane, finish_and_gather)
    return steps + down
