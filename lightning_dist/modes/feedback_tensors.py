"""What is owed, as the tensors of a checkpoint: values beside the state that says whose they are.

All fp32 values of a rank are one tensor of the checkpoint, ``feedback/<r>/values``, in as many pieces as there are
residues. So they are copied into reused host memory and written in the background, as all tensors are, and none of them
is copied twice. In the state a value is replaced by where it is in that tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_dist.parallel.boxes import Box, Spread
from lightning_dist.parallel.held_state import HeldTensor

_AT, _SHAPE = "values at", "shape"


def parted(state: Mapping[str, Any], name: str, *, rank: int) -> tuple[dict[str, Any], list[HeldTensor]]:
    """A state without its fp32 tensors, and these.

    Args:
        state: Containers, plain values and tensors.
        name: Of the tensor of the checkpoint that all of them make up.
        rank: Which holds them, alone.
    """
    found: list[tuple[int, Tensor]] = []
    size = 0

    def without(value: Any) -> Any:
        nonlocal size
        if isinstance(value, Tensor) and value.dtype is torch.float32:
            at, size = size, size + value.numel()
            if value.numel():
                found.append((at, value.detach().reshape(-1)))
            return {_AT: at, _SHAPE: list(value.shape)}
        if isinstance(value, Mapping):
            return {key: without(each) for key, each in value.items()}
        if isinstance(value, tuple | list):
            return [without(each) for each in value]
        return value

    plain: dict[str, Any] = without(state)
    held = [
        HeldTensor((name,), values, Spread((size,), (Box((at,), (values.numel(),), (0,)),), frozenset()), (rank,))
        for at, values in found
    ]
    return plain, held


def joined(state: Any, values: Tensor | None) -> Any:
    """A state with its tensors again, as views.

    Args:
        state: As :func:`parted` left it; lists stand where tuples were.
        values: [n]; ``None``: the state has all of its tensors, as older checkpoints have it, or had none.
    """
    if isinstance(state, Mapping):
        if state.keys() == {_AT, _SHAPE}:
            shape = torch.Size(state[_SHAPE])
            if not shape.numel():
                return torch.empty(shape)
            assert values is not None, "what has a place has values"
            return values[state[_AT] : state[_AT] + shape.numel()].view(shape)
        return {key: joined(each, values) for key, each in state.items()}
    if isinstance(state, list):
        return [joined(each, values) for each in state]
    return state
