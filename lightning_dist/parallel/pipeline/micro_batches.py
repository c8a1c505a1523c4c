"""A batch and its micro-batches; pure functions of nested tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dist.errors import ConfigError
from lightning_dist.parallel.batches import tensors_of

Signature = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
"""Types and shapes of a batch's tensors, in the order in which they are met."""


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch.

    Attributes:
        values: Nested as the batch; its tensors hold some of the samples.
        samples: How many.
        signature: Types and shapes of its tensors.
    """

    values: Any
    samples: int
    signature: Signature


def samples_of(batch: Any) -> int:
    """Samples of a batch: the size of the first dim of all its tensors, 0-dim ones excepted.

    Raises:
        ConfigError: It has no tensors, or they differ in it.
    """
    if isinstance(batch, Iterator):
        raise ConfigError(
            "a step that takes dataloader_iter fetches its batches itself, and a pipeline cuts each batch before it "
            "calls the step: write training_step(self, batch, batch_idx)"
        )
    sizes = {len(tensor) for tensor in tensors_of(batch) if tensor.dim()}
    if len(sizes) == 1:
        return sizes.pop()
    said = f"tensors of {', '.join(map(str, sorted(sizes)))} samples" if sizes else "no tensors"
    raise ConfigError(
        f"a pipeline cuts each batch along the first dim of its tensors, and this batch has {said}; give all tensors "
        "of a batch the same first dim"
    )


def split_batch(batch: Any, count: int) -> list[MicroBatch]:
    """Cut a batch along the first dim of its tensors.

    Args:
        batch: Tensors in any nesting of mappings, lists and (named) tuples; what else is in it every part gets.
        count: Number of parts, at most the number of samples; sizes differ by at most one, larger ones first.
    """
    samples = samples_of(batch)
    small, more = divmod(samples, count)
    parts, start = [], 0
    for index in range(count):
        size = small + (index < more)
        values = map_tensors(batch, lambda t, a=start, b=start + size: _part(t, a, b))  # type: ignore[misc]
        parts.append(MicroBatch(values, size, signature_of(values)))
        start += size
    return parts


def _part(tensor: Tensor, start: int, end: int) -> Tensor:
    """Some samples of it, in the same memory.

    ``data``, so that writing into one part does not count as writing into the others, which autograd may have kept.
    """
    return tensor[start:end].data if tensor.dim() else tensor


def signature_of(values: Any) -> Signature:
    """Types and shapes of the tensors."""
    return tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors_of(values))


def join(values: Sequence[Any], samples: Sequence[int]) -> Any:
    """Put together what micro-batches gave: values that are nested alike.

    Tensors are joined along their first dim; 0-dim ones are means over the samples, or counts where they are integers;
    of anything else the first is taken.

    Args:
        values: Of each micro-batch.
        samples: In each.
    """
    first = values[0]
    if isinstance(first, Tensor):
        return _join_tensors(values, samples)
    if isinstance(first, Mapping):
        return type(first)({key: join([value[key] for value in values], samples) for key in first})  # type: ignore[call-arg]
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(join(items, samples) for items in zip(*values, strict=True)))
    if isinstance(first, list | tuple):
        return type(first)(join(items, samples) for items in zip(*values, strict=True))
    return first


def _join_tensors(values: Sequence[Tensor], samples: Sequence[int]) -> Tensor:
    if values[0].dim():
        return torch.cat(list(values))
    together = torch.stack(list(values))
    if not (together.is_floating_point() or together.is_complex()):
        return together.sum()
    weights = torch.tensor(samples, dtype=torch.float64, device=together.device) / sum(samples)
    return (together * weights).sum().to(together.dtype)


def map_tensors(values: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same nesting with changed tensors."""
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, Mapping):
        return type(values)({key: map_tensors(item, change) for key, item in values.items()})  # type: ignore[call-arg]
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*(map_tensors(item, change) for item in values))
    if isinstance(values, list | tuple):
        return type(values)(map_tensors(item, change) for item in values)
    return values
