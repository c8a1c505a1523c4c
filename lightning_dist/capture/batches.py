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
_MOST_LOOKED_AT = 1000  # items of a batch, at 0.1 us each
_PLAIN = frozenset((bool, int, float, str, bytes, type(None)))
_END = object()
_TOKEN_TYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)


def measure(batch: Any, count_tokens: CountTokens | None = None) -> Batches:
    """Samples, tokens and bytes of a batch.

    Samples are the first dim of its first tensor that has one; tokens the elements of its first tensor of whole numbers
    with two dims, [samples x length]. What cannot be known so is ``None``, as are the bytes of a batch of thousands of
    items.

    Args:
        batch: Tensors in mappings, sequences and dataclasses.
        count_tokens: Counts the tokens instead.
    """
    samples: int | None = None
    tokens: int | None = None
    size_bytes: int | None = None
    tensors, is_all = tensors_of(batch)
    if tensors and is_all:
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    for tensor in tensors:
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


def tensors_of(batch: Any) -> tuple[list[torch.Tensor], bool]:
    """The tensors in a batch, in order, and whether it was gone through: of a long list the first items are looked at.

    A list of 100,000 words would take longer to look at than a step.
    """
    found: list[torch.Tensor] = []
    waiting: list[Iterator[Any]] = [iter((batch,))]
    looked_at = 0
    while waiting:
        value = next(waiting[-1], _END)
        if value is _END:
            waiting.pop()
            continue
        looked_at += 1
        if looked_at > _MOST_LOOKED_AT:
            return found, False
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) not in _PLAIN and len(waiting) <= _DEEPEST:
            waiting.append(_inside(value))
    return found, True


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        return iter(value.values())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return iter(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (getattr(value, field.name) for field in dataclasses.fields(value))
    return iter(())


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
