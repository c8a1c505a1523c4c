"""Batches read ahead, in order: by no worker, by threads on ``torchdata.nodes``, or by processes of a ``DataLoader``.

Note [Why processes are a DataLoader's]
    ``torchdata.nodes.ParallelMapper(method="process")`` (0.11) waits for ever for a worker that was killed, and its
    workers outlive a rank that was. The workers of torch's own loader do neither. With ``batch_size=None`` it is a
    mapping too: its sampler gives plans, its data set is the function that reads one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torchdata.nodes import BaseNode, ParallelMapper, PinMemory, Prefetcher

from lightning_dist.data.loading.patient_workers import make_patient
from lightning_dist.errors import DataError

_JOIN_S = 5.0

Plan = TypeVar("Plan")
Batch = TypeVar("Batch")


class Reading(Iterator[Batch]):
    """Results of a function over plans, in their order.

    Args:
        plans: What to read; taken as far ahead as workers are.
        read: Makes a batch of a plan. With ``processes`` it is sent to them.
        workers: How many; 0 reads when a batch is asked for.
        processes: Whether workers are processes.
        prefetch: Batches a worker has ready, or in work.
        pin_memory: Put batches into pinned memory, if there is CUDA.
        timeout_s: With processes: how long a batch may take, in seconds.
    """

    def __init__(
        self,
        plans: Iterable[Plan],
        read: Callable[[Plan], Batch],
        *,
        workers: int,
        processes: bool,
        prefetch: int,
        pin_memory: bool,
        timeout_s: float,
    ) -> None:
        pins = pin_memory and torch.cuda.is_available()
        self._nodes: list[Any] = []
        self._timeout_s = timeout_s
        self._iterator: Iterator[Batch] | None
        if workers and processes:
            self._iterator = _by_processes(plans, read, workers, prefetch, pins, timeout_s)
            return
        node: BaseNode[Any] = _Plans(plans)
        if workers:
            read = _ThreadRead(read)
        node = ParallelMapper(node, read, num_workers=workers, method="thread", snapshot_frequency=0)
        self._nodes.append(node)
        if workers and prefetch > 2:  # a mapper has two for each thread
            node = Prefetcher(node, (prefetch - 2) * workers, snapshot_frequency=0)
            self._nodes.append(node)
        if pins:
            node = PinMemory(node, snapshot_frequency=0)
            self._nodes.append(node)
        self._iterator = node

    def __next__(self) -> Batch:
        if self._iterator is None:
            raise StopIteration
        try:
            return next(self._iterator)
        except (ConnectionError, EOFError, FileNotFoundError, RuntimeError) as error:
            if self._nodes or not _is_of_a_dead_process(error):
                raise
            raise DataError(
                "a process that reads data has ended, or gives nothing for data.timeout_s="
                f"{self._timeout_s:g} s ({error}): was it killed, for want of memory perhaps, or is storage stuck?"
            ) from error

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        iterator, self._iterator = self._iterator, None
        if hasattr(iterator, "_shutdown_workers"):
            _end_processes(iterator)
        while self._nodes:  # threads of nodes end with the last reference, which the traceback of an error may hold
            _end(self._nodes.pop())


def _end_processes(iterator: Any) -> None:
    """End the workers of a DataLoader; it has no public name for that."""
    try:
        iterator._shutdown_workers()
    except RuntimeError as error:  # from torch's handler of SIGCHLD: one had died, and the others were ended unseen
        if not _is_of_a_dead_process(error):
            raise
        for worker in iterator._workers:
            worker.join(_JOIN_S)


def _is_of_a_dead_process(error: Exception) -> bool:
    """Whether torch's loader says so, or cannot hear its worker; what a worker has raised begins otherwise."""
    text = str(error)
    if isinstance(error, RuntimeError):
        return text.startswith(("DataLoader worker (pid", "DataLoader timed out"))
    return not text.startswith("Caught ")


def _end(node: Any) -> None:
    """End the threads of a node; it has no public name for that."""
    while node is not None:
        if shutdown := getattr(node, "_shutdown", None):
            shutdown()
        node = vars(node).get("_it")


class _Plans(BaseNode[Any]):  # type: ignore[misc]  # torchdata has no types
    def __init__(self, plans: Iterable[Any]) -> None:
        super().__init__()
        self._plans = plans
        self._iterator: Iterator[Any] = iter(())

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._iterator = iter(self._plans)

    def next(self) -> Any:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        return {}  # where training is, is known to the loader


class _PlanSampler(Sampler[Any]):
    def __init__(self, plans: Iterable[Any]) -> None:
        self._plans = plans

    def __iter__(self) -> Iterator[Any]:
        return iter(self._plans)


class _Reads(Dataset[Any], Generic[Batch]):
    def __init__(self, read: Callable[[Any], Batch]) -> None:
        self._read = read

    def __getitem__(self, plan: Any) -> Batch:
        return self._read(plan)


class _ThreadRead(Generic[Plan, Batch]):
    """Reads in a thread of ``torchdata.nodes``, which ends without a word, and leaves its rank waiting for ever, with
    what is no ``Exception``: ``sys.exit()``, or a panic of a package in Rust.
    """

    def __init__(self, read: Callable[[Plan], Batch]) -> None:
        self._read = read

    def __call__(self, plan: Plan) -> Batch:
        try:
            return self._read(plan)
        except Exception:
            raise
        except BaseException as error:
            raise DataError(f"a thread that reads data was ended by {type(error).__name__}: {error}") from error


def _as_it_is(batch: Any) -> Any:
    return batch


def _by_processes(
    plans: Iterable[Any], read: Callable[[Any], Batch], workers: int, prefetch: int, pins: bool, timeout_s: float
) -> Iterator[Batch]:
    loader: DataLoader[Any] = DataLoader(
        _Reads(read),
        batch_size=None,
        sampler=_PlanSampler(plans),
        num_workers=workers,
        prefetch_factor=prefetch,
        pin_memory=pins,
        collate_fn=_as_it_is,
        timeout=timeout_s,
        generator=torch.Generator(),  # else it draws from that of training
    )
    make_patient(loader)
    # A forked process inherits the garbage of this one, and dies if it collects what only a thread can end: process
    # groups of Gloo. What is frozen is never collected there.
    gc.freeze()
    try:
        return iter(loader)
    finally:
        gc.unfreeze()
