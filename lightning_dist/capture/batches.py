"""How much is in a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_dist.monitor.steps import Batches

CountTokens = Callable[[Any], int]
"""Tokens of a batch, for those that :func:`measure` does not see."""

_DEEPEST = 8
_TOKEN_TYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)


def measure(batch: Any, count_tokens: CountTokens | None = None) -> Batches:
    """Samples, tokens and bytes of a batch.

    Samples are the first dim of its first tensor that has one; tokens the elements of its first tensor of whole numbers
    with two dims, [samples x length]. What cannot be known so is ``None``.

    Args:
        batch: Tensors in mappings, sequences and dataclasses.
        count_tokens: Counts the tokens instead.
    """
    samples: int | None = None
    tokens: int | None = None
    size_bytes: int | None = None
    for tensor in tensors_of(batch):
        size_bytes = (size_bytes or 0) + tensor.numel() * tensor.element_size()
        if samples is None and tensor.ndim:
            samples = tensor.shape[0]
        if tokens is None and tensor.ndim == 2 and tensor.dtype in _TOKEN_TYPES:
            tokens = tensor.numel()
    if count_tokens is not None:
        tokens = count_tokens(batch)
    return Batches(1, samples, tokens, size_bytes)


def together(one: Batches | None, other: Batches) -> Batches:
    """Two of a step; what is unknown of one is unknown of both."""
    if one is None:
        return other
    return Batches(
        one.count + other.count,
        _sum(one.samples, other.samples),
        _sum(one.tokens, other.tokens),
        _sum(one.size_bytes, other.size_bytes),
    )


def tensors_of(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in a batch, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _DEEPEST and not isinstance(value, str | bytes):
        inner: Sequence[Any] = ()
        if isinstance(value, Mapping):
            inner = list(value.values())
        elif isinstance(value, Sequence):
            inner = value
        elif dataclasses.is_dataclass(value):
            inner = [getattr(value, field.name) for field in dataclasses.fields(value)]
        for each in inner:
            yield from tensors_of(each, depth + 1)


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
