"""Copies of tensors in host memory that is allocated once and used again.

Note [What the copy waits for, and what waits for it]
    On CUDA the copies run on a stream of their own into pinned memory. That stream first waits for the one that trains,
    which has the values still to write; and the one that trains waits for it before its next kernel, which may
    overwrite them. The host waits for neither, until :meth:`HostCopies.wait`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from lightning_dist.checkpoint.late_copy import Late, LateCopy

_ALIGNMENT = 64  # bytes; of every type, and of cache lines
_NONE: Mapping[int, Late] = MappingProxyType({})


class HostCopies:
    """Holds one set of copies at a time.

    Args:
        device: Where the tensors live.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._kinds: list[tuple[torch.dtype, torch.Size]] = []
        self._copies: list[Tensor] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._late: LateCopy | None = None

    @property
    def size_bytes(self) -> int:
        """Memory that is held."""
        return self._memory.numel()

    def take(self, tensors: Sequence[Tensor], late: Mapping[int, Late] = _NONE) -> list[Tensor]:
        """Copy tensors; the copies of the call before are overwritten.

        Args:
            tensors: Of any shape, type and layout, on the device or on the host.
            late: Index -> what that tensor is, of those that may be copied while the caller goes on. They must not
                change until :meth:`settle`.

        Returns:
            Contiguous copies in host memory, complete after :meth:`complete`.
        """
        self.settle()
        kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if kinds != self._kinds:
            self._kinds, self._copies = kinds, self._laid_out(tensors)
        copies = self._copies
        now = [index for index in range(len(tensors)) if index not in late]
        self._copy_now([tensors[index] for index in now], [copies[index] for index in now])
        if late:
            sources = [tensors[index].detach() for index in late]
            self._late = LateCopy(sources, [copies[index] for index in late], list(late.values()), self._stream)
        return copies

    def _copy_now(self, tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        if self._stream is None:
            self._copy(tensors, copies)
            return
        training = torch.cuda.current_stream(self._device)  # see Note [What the copy waits for, and what waits for it]
        self._stream.wait_stream(training)
        with torch.cuda.stream(self._stream):
            self._copy(tensors, copies)
            self._copied = self._stream.record_event()
        training.wait_event(self._copied)

    @property
    def is_copying(self) -> bool:
        """Whether something is, or was, copied late, and :meth:`settle` has not been called since."""
        return self._late is not None and not self._late.is_settled

    def settle(self) -> None:
        """Before what is copied late may change: wait until it is copied. For the thread that called :meth:`take`."""
        if self._late is not None:
            self._late.settle()

    def copy_rest(self) -> None:
        """Copy what is missing, or wait for it; any thread may call it, and again."""
        if self._late is not None:
            self._late.copy_rest()

    def complete(self) -> None:
        """The same, and see that the copies are what they are to be.

        Raises:
            CheckpointError: What is copied late was changed meanwhile.
        """
        if self._copied is not None:
            self._copied.synchronize()
        if self._late is not None:
            self._late.complete()

    def release(self) -> None:
        """Give the memory back. The copies are gone. Safe to call twice."""
        self.settle()
        if self._copied is not None:
            self._copied.synchronize()
        self._late = None
        self._kinds, self._copies = [], []
        self._memory = torch.empty(0, dtype=torch.uint8)

    @torch.inference_mode(False)  # they are written outside of it, too
    def _laid_out(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        self._copies = []
        self._reserve(end)
        return [self._view(tensor, start) for tensor, start in zip(tensors, starts, strict=True)]

    def _reserve(self, size_bytes: int) -> None:
        if self._memory.numel() < size_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # never both
            self._memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)

    def _view(self, tensor: Tensor, start: int) -> Tensor:
        size_bytes = tensor.numel() * tensor.element_size()
        return self._memory[start : start + size_bytes].view(tensor.dtype).view(tensor.shape)

    def _copy(self, tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                copy.copy_(tensor, non_blocking=True)
