"""Copies of tensors in host memory that is allocated once and used again.

Note [What the copy waits for, and what waits for it]
    On CUDA the copies run on a stream of their own into pinned memory. That stream first waits for the one that trains,
    which has the values still to write; and the one that trains waits for it before its next kernel, which may
    overwrite them. The host waits for neither, until :meth:`HostCopies.wait`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes; of every type, and of cache lines


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

    @property
    def size_bytes(self) -> int:
        """Memory that is held."""
        return self._memory.numel()

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors; the copies of the call before are overwritten.

        Args:
            tensors: Of any shape, type and layout, on the device or on the host.

        Returns:
            Contiguous copies in host memory, complete after :meth:`wait`.
        """
        kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if kinds != self._kinds:
            self._kinds, self._copies = kinds, self._laid_out(tensors)
        copies = self._copies
        if self._stream is None:
            self._copy(tensors, copies)
            return copies
        training = torch.cuda.current_stream(self._device)  # see Note [What the copy waits for, and what waits for it]
        self._stream.wait_stream(training)
        with torch.cuda.stream(self._stream):
            self._copy(tensors, copies)
            self._copied = self._stream.record_event()
        training.wait_stream(self._stream)
        return copies

    def wait(self) -> None:
        """Wait until the copies are complete; any thread may call it."""
        if self._copied is not None:
            self._copied.synchronize()

    def release(self) -> None:
        """Give the memory back. The copies are gone. Safe to call twice."""
        self.wait()
        self._kinds, self._copies = [], []
        self._memory = torch.empty(0, dtype=torch.uint8)

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
        for tensor, copy in zip(tensors, copies, strict=True):
            copy.copy_(tensor.detach(), non_blocking=True)
