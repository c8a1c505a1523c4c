"""Buffers that a forward writes to, such as BatchNorm's statistics, and running that forward again without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

Slot = tuple[nn.Module, str]
Snapshot = dict[Slot, Tensor]


class WrittenBuffers:
    """The buffers that a block writes to in its forward, as its first forward shows.

    The sequence of calls, each for one forward: :meth:`snapshot` before it, :meth:`watched` around it, and
    :meth:`rewound` around each repetition. A repetition then reads what the forward read and leaves what is there now:
    a power iteration (spectral norm) gives the same weight again, and running statistics are updated once.

    A buffer that is written for the first time in a later forward (every tenth step, say) goes unnoticed, unless it is
    a running statistic of torch's own norms.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._written: set[Slot] | None = None

    @property
    def may_exist(self) -> bool:
        """Whether the block writes to buffers, or has not run yet."""
        return self._written is None or bool(self._written)

    def snapshot(self) -> Snapshot:
        """Copies of what the next forward may write to: all buffers before the first one, later those it wrote to."""
        slots = _slots(self._block) if self._written is None else self._written
        return {(module, name): _buffer(module, name).clone() for module, name in slots}

    @contextmanager
    def watched(self, snapshot: Snapshot) -> Iterator[None]:
        """Around a forward: learn, the first time, what it writes to, and drop the copies of everything else."""
        if self._written is not None:
            yield
            return
        before = {slot: (_buffer(*slot), _version(_buffer(*slot))) for slot in snapshot}
        yield
        self._written = {slot for slot, (buffer, version) in before.items() if _is_written(slot, buffer, version)}
        for slot in snapshot.keys() - self._written:
            del snapshot[slot]

    @contextmanager
    def rewound(self, snapshot: Snapshot) -> Iterator[None]:
        """Around a repetition: buffers are copies of what they were, then what they are now."""
        present = {(module, name): module._buffers[name] for module, name in snapshot}
        try:
            for (module, name), value in snapshot.items():
                module._buffers[name] = value.clone()
            yield
        finally:
            for (module, name), buffer in present.items():
                module._buffers[name] = buffer


def _slots(block: nn.Module) -> list[Slot]:
    return [
        (module, name) for module in block.modules() for name, buffer in module._buffers.items() if buffer is not None
    ]


def _buffer(module: nn.Module, name: str) -> Tensor:
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer


def _version(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version


def _is_written(slot: Slot, buffer: Tensor, version: int) -> bool:
    module, name = slot
    if isinstance(module, _NormBase) and module.track_running_stats:
        return True  # batch norm's kernels write running statistics without raising their version (torch 2.13)
    return module._buffers.get(name) is not buffer or _version(buffer) != version
