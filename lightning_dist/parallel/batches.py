"""Ranks that share layers, or a pipeline, must read the same batches; whether they do is found out once an epoch."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.errors import ConfigError


def check_batches(batch: Any, collectives: Collectives, group: RankGroup, device: torch.device, *, doing: str) -> None:
    """Compare a batch over the ranks that must read the same; collective inside the group.

    Args:
        batch: Its tensors, arrays, strings and numbers are compared, in any nesting of mappings, lists, tuples and
            dataclasses.
        collectives: The seam.
        group: The ranks that must read the same.
        device: What the group's backend takes.
        doing: Why they must, e.g. ``"share each layer"``.

    Raises:
        ConfigError: They differ; on all ranks of the group.
    """
    different = who_differs(fingerprint(batch), collectives, group, device)
    if different is not None:
        raise ConfigError(
            f"rank {group.ranks[0]} and rank {different} {doing}, so they must read the same batches, but "
            "their first ones of an epoch or an evaluation differ. Let Lightning insert its sampler, or take the part "
            "of the data from trainer.distributed_sampler_kwargs (num_replicas, rank), not from trainer.world_size and "
            "trainer.global_rank"
        )


def who_differs(mark: int, collectives: Collectives, group: RankGroup, device: torch.device) -> int | None:
    """The first rank whose mark is not that of the group's first; ``None``: all are alike. Collective inside the group.

    Args:
        mark: This rank's.
        collectives: The seam.
        group: The ranks that share layers.
        device: What the group's backend takes.
    """
    said = torch.zeros(group.size, dtype=torch.int64, device=device)
    said[group.index] = mark
    collectives.all_reduce(said, group)
    marks = said.tolist()
    return next((rank for rank, other in zip(group.ranks, marks, strict=True) if other != marks[0]), None)


def fingerprint(batch: Any) -> int:
    """A number of 32 bits that depends on the types, shapes and values in the batch; other objects do not count."""
    mark = 0
    for leaf in _leaves(batch):
        mark = zlib.crc32(_content(leaf), zlib.crc32(_form(leaf), mark))
    return mark


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(key)
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name))
    else:
        yield value


def _form(leaf: Any) -> bytes:
    shape = tuple(leaf.shape) if isinstance(leaf, Tensor | np.ndarray) else ()
    return f"{type(leaf).__name__}{getattr(leaf, 'dtype', '')}{shape}".encode()


def _content(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided or not leaf.numel():
            return b""
        content: bytes = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return content
    if isinstance(leaf, np.ndarray):
        return b"" if leaf.dtype.hasobject else leaf.tobytes()
    if isinstance(leaf, bytes):
        return leaf
    return repr(leaf).encode() if isinstance(leaf, str | int | float | complex | np.generic) else b""


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in any nesting of mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
