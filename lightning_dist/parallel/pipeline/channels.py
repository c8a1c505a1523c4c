"""What travels between the stages of a pipeline: activations one way, their gradients the other.

Note [Four groups]
    A backend may run the messages between two ranks in the order in which they were posted (NCCL does, on one stream
    for each pair of a group). Rank A posts "send activation, receive gradient", rank B "send gradient, receive
    activation": with one group each waits for the other. So each kind of message has a group of its own, and so has,
    where a rank has several stages, each direction between two ranks.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dist.comm.collectives import Collectives, Pending, RankGroup
from lightning_dist.comm.groups import destroy

ACTIVATION, GRADIENT = "activations", "gradients"


class TensorKind(NamedTuple):
    """What a tensor looks like that crosses a boundary.

    Attributes:
        shape: Of the tensor.
        dtype: Of its values.
        has_gradient: Whether a gradient comes back for it: it depends on parameters that train.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool

    def __str__(self) -> str:
        """E.g. ``float32 [4, 8] with a gradient``."""
        text = f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"
        return f"{text} with a gradient" if self.has_gradient else text

    @property
    def size_bytes(self) -> int:
        """Bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Boundary = tuple[TensorKind, ...]
"""What a stage gives to the next for one micro-batch."""


class Sent:
    """A message on its way, and the tensors it is made of, which must live until then."""

    def __init__(self, pending: Pending, tensors: list[Tensor]) -> None:
        self._pending = pending
        self._tensors = tensors

    def wait(self) -> None:
        """Block until it has left; on CUDA only the stream waits."""
        self._pending.wait_late()
        self._tensors = []


class Arriving:
    """A message that is to come."""

    def __init__(self, pending: Pending, tensors: tuple[Tensor, ...]) -> None:
        self._pending = pending
        self._tensors = tensors

    def wait(self) -> tuple[Tensor, ...]:
        """Block until it is there."""
        self._pending.wait_late()
        return self._tensors


class Channels:
    """Messages between the ranks of one pipeline.

    Args:
        groups: (kind, whether the sender stands before the receiver in the pipeline) -> the pipeline's ranks, in order.
        collectives: The seam.
        device: Where messages live.
    """

    def __init__(
        self, groups: Mapping[tuple[str, bool], RankGroup], collectives: Collectives, device: torch.device
    ) -> None:
        self._groups = dict(groups)
        self.position = next(iter(groups.values())).index  # this rank's place in the pipeline
        self._collectives = collectives
        self._device = device

    def close(self) -> None:
        """Close the connections, so that who waits for this rank is told at once. Safe to call twice.

        They close when nothing refers to their groups any more (torch 2.13: ``abort`` of a group of Gloo's leaves them
        open), so these are kept nowhere else; messages under way and the frames of an error may still do.
        """
        groups = list(self._groups.values())
        self._groups.clear()
        destroy(groups)

    def send(self, tensors: list[Tensor], *, kind: str, receiver: int, what: str, tag: int) -> Sent:
        """Begin to send; the receiver calls :meth:`receive` with the same kind and tag.

        Args:
            tensors: As many as the receiver expects.
            kind: :data:`ACTIVATION` or :data:`GRADIENT`.
            receiver: Place in the pipeline.
            what: What it is, for errors, e.g. ``"sending the input of stage 1 for micro-batch 3"``.
            tag: Number of the message among those of its kind under way at a time.
        """
        group = self._groups[kind, self.position < receiver]
        ready = [tensor.contiguous() for tensor in tensors]
        pending = self._collectives.start_exchange([(receiver, t) for t in ready], [], group, what, tag)
        return Sent(pending, ready)

    def receive(self, boundary: Boundary, *, kind: str, sender: int, what: str, tag: int) -> Arriving:
        """Begin to receive what another rank sends.

        Args:
            boundary: What comes.
            kind: :data:`ACTIVATION` or :data:`GRADIENT`.
            sender: Place in the pipeline.
            what: What it is, for errors.
            tag: As the sender's.
        """
        group = self._groups[kind, sender < self.position]
        empty = tuple(torch.empty(each.shape, dtype=each.dtype, device=self._device) for each in boundary)
        pending = self._collectives.start_exchange([], [(sender, t) for t in empty], group, what, tag)
        return Arriving(pending, empty)


def clear_frames(error: BaseException) -> None:
    """Let go what the frames of an error, and of those behind it, refer to."""
    behind: BaseException | None = error
    seen: set[BaseException] = set()  # an error raised again while what it caused is handled stands behind itself
    while behind is not None and behind not in seen:
        seen.add(behind)
        traceback.clear_frames(behind.__traceback__)
        behind = behind.__cause__ or behind.__context__
