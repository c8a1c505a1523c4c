"""How many bytes a block keeps for backward, and how long its forward takes: measured in a step in which it keeps none.

While a block runs under :func:`torch.utils.checkpoint.checkpoint`, everything autograd would keep passes through the
checkpoint's hook, which drops it. The meter stands in front of that hook and counts what passes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Mark = int | torch.Event


class StorageLedger:
    """Which storages were counted, so that views and repeated uses count once."""

    def __init__(self) -> None:
        # A weak reference keeps the address of a freed storage from being given to another one.
        self._seen: dict[int, StorageWeakRef] = {}

    def count(self, tensors: Iterable[Tensor], *, but: frozenset[int] = frozenset()) -> int:
        """Bytes of the storages that are new, except those whose address is in ``but``."""
        size_bytes = 0
        for tensor in tensors:
            for storage in _storages(tensor):
                reference = StorageWeakRef(storage)
                if reference.cdata not in but and reference.cdata not in self._seen:
                    self._seen[reference.cdata] = reference
                    size_bytes += storage.nbytes()
        return size_bytes

    @property
    def addresses(self) -> frozenset[int]:
        """Of all storages counted."""
        return frozenset(self._seen)


class Stopwatch:
    """Marks in time: of the host's clock, or on the device's stream, where host time says nothing."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns

    def mark(self, device: torch.device) -> Mark:
        """Now, on ``device``; never waits for it."""
        if device.type == "cpu":
            return self._clock_ns()
        event = torch.Event(device=device, enable_timing=True)
        event.record()
        return event

    def elapsed_ns(self, start: Mark, end: Mark) -> int:
        """Between two marks on one device; waits for the device."""
        if isinstance(start, int) or isinstance(end, int):
            assert isinstance(start, int) and isinstance(end, int)  # noqa: PT018  # narrows both types
            return end - start
        end.synchronize()
        return int(start.elapsed_time(end) * 1e6)


class Measurement:
    """One pass over a model: forward until the first backward reaches a block, then recomputations.

    Storages are counted once over all blocks: a mask or a rotary table that all of them take is kept once.

    Args:
        clock_ns: Monotonic, in nanoseconds; for blocks on the CPU.
    """

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self.inputs = StorageLedger()
        self.inner = StorageLedger()
        self.stopwatch = Stopwatch(clock_ns)
        self.is_counting = True
        """Whether forwards are counted: after the first recomputation, activations are being freed."""

    def meter(self, block: nn.Module) -> ActivationMeter:
        """A meter for one block."""
        return ActivationMeter(block, self)


class ActivationMeter:
    """What one block keeps and costs, summed over its calls; made by :meth:`Measurement.meter`.

    Attributes:
        input_bytes: Its tensor arguments, without parameters and buffers of its own.
        inner_bytes: What autograd would keep besides, without these.
    """

    def __init__(self, block: nn.Module, measurement: Measurement) -> None:
        self.input_bytes = 0
        self.inner_bytes = 0
        self._block = block
        self._measurement = measurement
        self._device = torch.device("cpu")
        self._forwards: list[tuple[Mark, Mark]] = []
        self._recomputations: list[tuple[Mark, Mark]] = []

    def forward_ns(self) -> int:
        """Nanoseconds of all its calls: calls times the median of forward or of recomputation, whichever is less.

        A first forward may compile, or warm up what later ones find warm. Waits for the device.
        """
        elapsed_ns = self._measurement.stopwatch.elapsed_ns
        typical = [
            statistics.median_low([elapsed_ns(*span) for span in spans])
            for spans in (self._forwards, self._recomputations)
            if spans
        ]
        return len(self._forwards) * min(typical, default=0)

    @contextmanager
    def forward(self, arguments: Iterable[Any]) -> Iterator[None]:
        """Around a forward, inside the checkpoint's hook."""
        if not self._measurement.is_counting:
            yield
            return
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        self.input_bytes += self._measurement.inputs.count(tensors, but=self._own())
        # Only the innermost hooks act, and there is no public way to pass on to those beneath.
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)

        def counted(tensor: Tensor) -> Any:
            # Asked each time: FSDP2's hooks put gathered parameters in place, and may do so inside.
            known = self._own() | self._measurement.inputs.addresses
            self.inner_bytes += self._measurement.inner.count([tensor], but=known)
            return pack(tensor)

        self._device = next((tensor.device for tensor in tensors), self._device)
        start = self._measurement.stopwatch.mark(self._device)
        with torch.autograd.graph.saved_tensors_hooks(counted, unpack):
            yield
        self._forwards.append((start, self._measurement.stopwatch.mark(self._device)))

    @contextmanager
    def recomputation(self) -> Iterator[None]:
        """Around a repetition, which usually ends early, by an exception, when all that was kept is there again."""
        self._measurement.is_counting = False
        start = self._measurement.stopwatch.mark(self._device)
        try:
            yield
        finally:
            self._recomputations.append((start, self._measurement.stopwatch.mark(self._device)))

    def _own(self) -> frozenset[int]:
        """Addresses of what is no activation: the block's parameters and buffers, as they are now."""
        tensors = (*self._block.parameters(), *self._block.buffers())
        return frozenset(storage._cdata for tensor in tensors for storage in _storages(tensor))


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    if is_traceable_wrapper_subclass(tensor):  # a DTensor has no storage of its own
        names, _ = tensor.__tensor_flatten__()
        for inner in (getattr(tensor, name) for name in names):
            if isinstance(inner, Tensor):  # a DTensor's mesh is among them (torch 2.13)
                yield from _storages(inner)
    else:
        yield tensor.untyped_storage()
