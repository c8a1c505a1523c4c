"""A copy that goes on while the next forward and backward run: of values that only an optimizer's step changes.

Note [Who copies what is late]
    Memory of the host is copied piece by piece by the thread that writes. Whoever needs the end, most of all the thread
    that trains, takes pieces too, so it waits for no more than what is missing. On CUDA the pieces are queued at once
    on the copies' stream; the thread that trains lets its stream, not itself, wait for them.

Note [How a change is found]
    What is copied late must stay as it is until :meth:`LateCopy.settle`. Version counters tell: torch counts a change
    in place before the operation returns. They are looked at when the copy is complete, and once more when it has been
    written, for an operation that had not returned at the first look; or in :meth:`LateCopy.settle`, by the thread that
    would have made the change, if that comes first. Changes of ``tensor.data`` are not counted, nor those of DTensors
    by ``torch._foreach_...``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dist.errors import CheckpointError


class Late(NamedTuple):
    """What is to be copied late.

    Attributes:
        name: For messages.
        counters: Tensors whose version counters tell of its changes.
    """

    name: str
    counters: tuple[Tensor, ...]


class LateCopy:
    """Begins when it is made, on the thread that trains.

    Args:
        sources: To be copied.
        copies: Where to.
        late: What they are.
        stream: That copies from a device, if there is one; what was queued there before comes first.
    """

    def __init__(
        self,
        sources: Sequence[Tensor],
        copies: Sequence[Tensor],
        late: Sequence[Late],
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._late = [(each, _versions(each)) for each in late]
        self._on_device: list[Tensor] = []  # they may not be freed while they are copied
        self._pieces: deque[tuple[Tensor, Tensor]] = deque()
        self._ended = threading.Condition()
        self._lock = threading.Lock()
        self._is_settled = False
        self._changed: str | None = None
        self._failure: Exception | None = None
        self._stream = stream
        self._copied: torch.cuda.Event | None = None
        for source, copy in zip(sources, copies, strict=True):
            if stream is not None and source.device.type == "cuda":
                with torch.cuda.stream(stream):
                    copy.copy_(source, non_blocking=True)
                self._on_device.append(source)
            else:
                self._pieces.append((source, copy))
        self._num_left = len(self._pieces)
        if stream is not None:
            self._copied = stream.record_event()

    @property
    def is_settled(self) -> bool:
        """Whether the values may change again."""
        return self._is_settled

    def copy_rest(self) -> None:
        """Copy what is missing, and wait for what others copy; any thread may call it, and again."""
        while True:
            try:
                source, copy = self._pieces.popleft()
            except IndexError:
                break
            try:
                self._copy_piece(source, copy)
            except Exception as error:  # raised by complete(), to the thread that writes
                self._failure = error
            with self._ended:
                self._num_left -= 1
                self._ended.notify_all()
        with self._ended:
            self._ended.wait_for(lambda: not self._num_left)

    def complete(self) -> None:
        """The same, on CUDA too, and see that the copies are what they are to be.

        Raises:
            CheckpointError: The values were changed meanwhile, or could not be copied.
        """
        self.copy_rest()
        if self._copied is not None:
            self._copied.synchronize()
        self._look()
        if self._changed is not None:
            raise CheckpointError(
                f"{self._changed} was changed in place between the checkpoint and the next optimizer step, while it "
                "was being copied; with checkpoint.snapshot=overlapped only that step may: change weights before "
                "saving, or write checkpoint.snapshot=at_once"
            )
        if self._failure is not None:
            raise self._failure

    def settle(self) -> None:
        """Whatever follows on the thread that trains may change the values."""
        self.copy_rest()
        if self._copied is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)
        self._look(last=True)

    def _copy_piece(self, source: Tensor, copy: Tensor) -> None:
        copy.copy_(source)  # without the interpreter's lock

    def _look(self, *, last: bool = False) -> None:
        """See Note [How a change is found]."""
        with self._lock:
            if self._is_settled:
                return
            if self._changed is None:
                self._changed = next((each.name for each, seen in self._late if _versions(each) != seen), None)
            if last:
                self._is_settled = True
                self._late, self._on_device = [], []


def _versions(late: Late) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in late.counters)
