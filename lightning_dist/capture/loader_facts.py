"""What a rank's training loader is, for the verdict: whether ranks share the data set or each read all of it.

Nothing is read and nothing guessed: what a loader does not say is ``None``. A data set may say its size on storage by
an attribute ``size_bytes``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sized
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DistributedSampler, IterableDataset

from lightning_dist.data.loading.loader import ShardedLoader

_CPU_INFO = Path("/proc/cpuinfo")
_LOOKED_AT = 1000  # items of a list
_LESS, _LEAST = 20, 8  # so many times fewer of a list in it, but no fewer
_MOST_LOOKED_AT = 500_000  # in all
_MOST_WRAPPED = 100  # samplers, and data sets, around each other; some have any attribute that is asked for
_SHARE = 1.1  # of a rank's even share of the samples: samplers round up


def loader_facts(trainer: pl.Trainer) -> dict[str, Any]:
    """Facts of this rank's training loader and machine, once the loaders are there; never raises.

    Returns:
        ``loader``, ``dataset``, ``sampler``: class names. ``is_sharded``: whether ranks read different samples;
        ``None``: not to be seen. ``dataset_length``: samples of the whole set. ``samples_per_epoch``: of this rank.
        ``dataset_bytes``: on storage. ``held_bytes``: of tensors, arrays and bytes that the data set holds in this
        rank's memory. ``workers``: processes that read. ``pin_memory``: whether batches are pinned.
        ``data_parallel_rank``: ranks with the same one read the same samples. ``cpu_model``, ``cpu_cores``.
    """
    facts: dict[str, Any] = {}
    for part in (host_facts, lambda: _of_ranks(trainer), lambda: _of_loader(trainer)):
        with contextlib.suppress(Exception):  # a user's data set may raise anything when it is asked something
            facts.update(part())
    return facts


def training_loaders(trainer: pl.Trainer) -> Iterator[Any]:
    """What ``fit`` was given, or the module's; none before training begins."""
    yield from getattr(trainer.fit_loop._combined_loader, "flattened", None) or ()


def host_facts() -> dict[str, Any]:
    """The processor's model and the cores that this process may use."""
    model = None
    if _CPU_INFO.exists():
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return {"cpu_model": model, "cpu_cores": len(os.sched_getaffinity(0))}


def _of_ranks(trainer: pl.Trainer) -> dict[str, Any]:
    part = trainer.distributed_sampler_kwargs
    return {"data_parallel_rank": part["rank"]} if part else {}


def _of_loader(trainer: pl.Trainer) -> dict[str, Any]:
    loaders = list(training_loaders(trainer))
    if len(loaders) != 1:
        return {"loader": f"{len(loaders)} loaders"} if loaders else {}
    return facts_of(loaders[0], num_parts=(trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))


def facts_of(loader: Any, *, num_parts: int) -> dict[str, Any]:
    """Facts of one loader.

    Args:
        loader: A ``DataLoader``, one of ours, or anything that gives batches.
        num_parts: How many ranks, or groups of ranks, read different samples, if they do.
    """
    if isinstance(loader, ShardedLoader):
        return _of_ours(loader)
    dataset = getattr(loader, "dataset", None)
    sampler = _sampler(loader)
    facts: dict[str, Any] = {"loader": type(loader).__name__, "workers": getattr(loader, "num_workers", None)}
    if dataset is None:
        return facts | {"is_sharded": True if num_parts == 1 else None}
    length = _length(dataset)
    # A batch sampler of the user's own has as many items as there are batches.
    mine = None if sampler is None or sampler is getattr(loader, "batch_sampler", None) else _length(sampler)
    return facts | {
        "dataset": type(dataset).__name__,
        "sampler": None if sampler is None else type(sampler).__name__,
        "is_sharded": _is_sharded(dataset, sampler, length, mine, num_parts),
        "dataset_length": length,
        "samples_per_epoch": mine,
        "dataset_bytes": _size_bytes(dataset),
        "held_bytes": held_bytes(dataset),
        "batch_size": getattr(loader, "batch_size", None),
        "pin_memory": getattr(loader, "pin_memory", None),
    }


def held_bytes(dataset: Any) -> int:
    """Bytes of the tensors, arrays and byte strings that a data set, or one that it wraps, has as attributes.

    Of long lists a part is looked at, and stands for the rest.
    """
    seen: set[int] = set()
    return sum(_bytes_of(value, seen) for part in _wrapped(dataset) for value in vars(part).values())


def _of_ours(loader: ShardedLoader) -> dict[str, Any]:
    order, dealing = loader.share.order, loader.share.dealing
    sizes = [source.index.size_bytes for source in loader.sources]
    is_mapped = any(source.is_mapped for source in loader.sources)
    return {
        "loader": type(loader).__name__,
        "dataset": ", ".join(source.name for source in loader.sources),
        "sampler": type(order).__name__,
        "is_sharded": True,
        "dataset_length": sum(source.index.num_samples for source in loader.sources),
        "samples_per_epoch": order.num_samples // dealing.num_replicas,
        "dataset_bytes": None if is_mapped else sum(sizes),
        "held_bytes": None if is_mapped else 0,
        "workers": loader.config.workers,
        "batch_size": loader.batch_size,
        "pin_memory": loader.config.pin_memory,
    }


def _is_sharded(dataset: Any, sampler: Any, length: int | None, mine: int | None, num_parts: int) -> bool | None:
    if num_parts == 1 or isinstance(sampler, DistributedSampler):
        return True
    if isinstance(dataset, IterableDataset) or length is None or mine is None:
        return None  # it may look at its rank inside
    if mine >= length:
        return False
    return True if mine * num_parts <= _SHARE * length else None  # else it may be a part that all ranks go through


def _sampler(loader: Any) -> Any:
    """What gives the indices of samples: Lightning wraps it where it injects its own, and so do batch samplers."""
    sampler = getattr(loader, "batch_sampler", None)
    if sampler is None:
        sampler = getattr(loader, "sampler", None)
    for _ in range(_MOST_WRAPPED):
        inner = getattr(sampler, "sampler", None)
        if inner is None or inner is sampler:
            break
        sampler = inner
    return sampler


def _length(sized: Any) -> int | None:
    try:
        return len(sized) if isinstance(sized, Sized) else None
    except (TypeError, NotImplementedError):  # an IterableDataset or sampler without a length
        return None


def _size_bytes(dataset: Any) -> int | None:
    sizes = [getattr(part, "size_bytes", None) for part in _wrapped(dataset)]
    return next((int(size) for size in sizes if isinstance(size, int | float)), None)


def _wrapped(dataset: Any) -> Iterator[Any]:
    """The data set and those that it wraps, as ``Subset`` and ``ConcatDataset`` do."""
    waiting: list[Any] = [dataset]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_WRAPPED:
        part = waiting.pop()
        if id(part) in seen or not hasattr(part, "__dict__"):
            continue
        seen.add(id(part))
        yield part
        waiting += [getattr(part, "dataset", None), *_list(getattr(part, "datasets", ()))]


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _bytes_of(value: Any, seen: set[int], most: int = _LOOKED_AT) -> int:
    if id(value) in seen or len(seen) >= _MOST_LOOKED_AT:
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.memmap):
        return 0  # on storage
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, bytes | bytearray):
        return len(value)
    if isinstance(value, list | tuple | dict):  # other mappings may read what they are asked for
        stride = max(-(-len(value) // most), 1)
        inner = value.values() if isinstance(value, dict) else value
        looked_at = list(islice(inner, 0, None, stride))
        less = max(most // _LESS, _LEAST)
        return sum(_bytes_of(each, seen, less) for each in looked_at) * len(value) // max(len(looked_at), 1)
    return 0
