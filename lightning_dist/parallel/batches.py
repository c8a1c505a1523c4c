"""Ranks that share layers, or a pipeline, must read the same batches; whether they do is found out at the first one."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.errors import ConfigError


def check_batches(batch: Any, collectives: Collectives, group: RankGroup, device: torch.device, *, doing: str) -> None:
    """Compare a batch over the ranks that must read the same; collective inside the group.

    Args:
        batch: Its tensors are compared, in any nesting of mappings, lists and tuples.
        collectives: The seam.
        group: The ranks that must read the same.
        device: What the group's backend takes.
        doing: Why they must, e.g. ``"share each layer"``.

    Raises:
        ConfigError: They differ; on all ranks of the group.
    """
    said = torch.zeros(group.size, dtype=torch.int64, device=device)
    said[group.index] = fingerprint(batch)
    collectives.all_reduce(said, group)
    marks = said.tolist()
    different = [rank for rank, mark in zip(group.ranks, marks, strict=True) if mark != marks[0]]
    if different:
        raise ConfigError(
            f"rank {group.ranks[0]} and rank {different[0]} {doing}, so they must read the same batches, but "
            "their first ones differ. Let Lightning insert its sampler, or take the part of the data from "
            "trainer.distributed_sampler_kwargs (num_replicas, rank), not from trainer.world_size and "
            "trainer.global_rank"
        )


def fingerprint(batch: Any) -> int:
    """A number of 32 bits that depends on the types, shapes and values of the batch's tensors."""
    mark = 0
    for tensor in tensors_of(batch):
        mark = zlib.crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), mark)
        if tensor.layout is torch.strided and tensor.numel():
            values = tensor.detach().cpu().contiguous().reshape(-1)
            mark = zlib.crc32(values.view(torch.uint8).numpy().tobytes(), mark)
    return mark


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
