"""What a training asks ``torch.distributed`` for, seen where it asks: Lightning's own calls, FSDP's and the user's.

Functions of its modules are replaced while a fit goes on; a collective stays the one that was asked for. What C++
starts by itself (DistributedDataParallel's buckets), what compiled code does, and what names a function before the fit
(``from torch.distributed import all_reduce``) is not seen here.

Note [On a device]
    A collective on a device returns at once, and the current stream waits for it: the span is that of the stream. On
    another stream than the one that trains it is an operation under way, and exposed is what FSDP2 has the training
    stream wait for.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from lightning_dist.capture.patches import Patches
from lightning_dist.events import WAIT, EventStream, Mark

_FUNCTIONS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
)
_OF_DTENSOR = (
    "all_gather_single",
    "all_gather_tensor",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)  # they begin an operation, and its result waits where it is used: in eager mode, at once or nearly so
_WAITING = ("wait_for_unshard", "finalize_backward")  # of FSDP2's parameter groups


class Watched:
    """What wrapping needs.

    Args:
        events: Where spans go.
        tier: The slowest that an operation crosses.
        is_on: Whether somebody still listens.
    """

    def __init__(self, events: EventStream, *, tier: str, is_on: Callable[[], bool]) -> None:
        self.events = events
        self.tier = tier
        self.is_on = is_on

    def span(self, operation: str, start: Mark, size_bytes: int | None, thread: int | None = None) -> None:
        """An operation that ends now."""
        self.events.span_from(
            f"comm.{operation}",
            start,
            lane="collectives",
            thread=thread,
            operation=operation,
            tier=self.tier,
            size_bytes=size_bytes,
        )


def watch_collectives(patches: Patches, watched: Watched) -> None:
    """Record each collective that is asked for from now on, until the patches are undone."""
    for name in _FUNCTIONS:
        if hasattr(dist, name):  # versions of torch differ
            patches.replace(dist, name, functools.partial(_recording, watched, name))
    for name in _WAITING:
        if hasattr(FSDPParamGroup, name):
            patches.replace(FSDPParamGroup, name, functools.partial(_waiting, watched, on_host=False))


def watch_dtensor(patches: Patches, watched: Watched) -> None:
    """Record what operators on distributed tensors ask for, and where their results are waited for."""
    for name in _OF_DTENSOR:
        if hasattr(funcol, name):
            patches.replace(funcol, name, functools.partial(_recording, watched, name))
    patches.replace(funcol, "wait_tensor", functools.partial(_waiting, watched, on_host=True))


def watch_call(patches: Patches, watched: Watched, owner: Any, name: str) -> None:
    """Record calls of a method that is a collective; an object that has none is left alone."""
    if hasattr(owner, name):
        patches.replace(owner, name, functools.partial(_recording, watched, name.strip("_")))


class WatchedWork(dist.Work):
    """An operation under way, which says when it was waited for.

    Args:
        work: The backend's.
        watched: Where to say it.
        operation: What it is called.
        size_bytes: Its payload.
        start: When it was started.
    """

    def __init__(self, work: dist.Work, watched: Watched, operation: str, size_bytes: int | None, start: Mark) -> None:
        super().__init__()
        self._work = work
        self._watched = watched
        self._said: tuple[str, Mark, int | None] | None = (operation, start, size_bytes)

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """As the backend's."""
        return bool(self._waited(functools.partial(self._work.wait, timeout) if timeout else self._work.wait))

    def block_current_stream(self) -> None:
        """As the backend's."""
        self._waited(self._work.block_current_stream)

    def _waited(self, wait: Callable[[], Any]) -> Any:
        start = self._watched.events.mark()
        try:
            return wait()
        finally:
            said, self._said = self._said, None
            if said is not None and self._watched.is_on():
                self._watched.events.span_from(WAIT, start)
                self._watched.span(*said, thread=0)

    def is_completed(self) -> bool:
        """As the backend's."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """As the backend's."""
        return self._work.is_success()

    def exception(self) -> Any:
        """As the backend's."""
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        """As the backend's."""
        return self._work.result()

    def synchronize(self) -> None:
        """As the backend's."""
        self._work.synchronize()

    def get_future(self) -> Any:
        """As the backend's."""
        return self._work.get_future()

    def get_future_result(self) -> Any:
        """As the backend's."""
        return self._work.get_future_result()  # type: ignore[attr-defined]  # torch does not declare it

    def boxed(self) -> Any:
        """As the backend's."""
        return self._work.boxed()

    def source_rank(self) -> int:
        """As the backend's."""
        return self._work._source_rank()


def _recording(watched: Watched, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not watched.is_on():
            return original(*args, **kwargs)
        start = watched.events.mark()
        given = None
        try:
            given = original(*args, **kwargs)
        finally:
            if not isinstance(given, dist.Work):
                watched.span(name, start, _size_bytes(args, kwargs))
        if isinstance(given, dist.Work):
            return WatchedWork(given, watched, name, _size_bytes(args, kwargs), start)
        return given

    return call


def _waiting(watched: Watched, original: Callable[..., Any], *, on_host: bool) -> Callable[..., Any]:
    """Record the calls as waits; on the host only if no wait inside them is seen."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_seen = on_host or watched.events.device_clock is not None
        if torch.compiler.is_compiling() or not is_seen or not watched.is_on():
            return original(*args, **kwargs)
        start = watched.events.mark()
        try:
            return original(*args, **kwargs)
        finally:
            watched.events.span_from(WAIT, start)

    return call


def _size_bytes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Of the largest tensor, or list of tensors, that is given."""
    sizes = [_bytes_of(value) for value in (*args, *kwargs.values())]
    return max((size for size in sizes if size is not None), default=None)


def _bytes_of(value: Any) -> int | None:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple) and value and all(isinstance(each, torch.Tensor) for each in value):
        sizes: list[int] = [each.numel() * each.element_size() for each in value]
        return sum(sizes)
    return None
