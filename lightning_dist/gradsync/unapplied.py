"""Mean gradients that the reducer does not apply, since no rank used their parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from lightning_dist.comm.feedback import Feedback

Means = Iterable[tuple[torch.Tensor, Sequence[torch.Tensor]]]
"""Buckets, and the parameters whose gradients are in them."""


def give_back(feedback: Feedback, means: Means, names: Mapping[torch.Tensor, str]) -> None:
    """What was made of them, with what was owed before, is owed still; one rank calls it, after the backward.

    Args:
        feedback: Where to.
        means: Of this backward.
        names: Of parameters.
    """
    for buffer, parameters in means:
        values = buffer.split([parameter.numel() for parameter in parameters])
        for parameter, mean in zip(parameters, values, strict=True):
            if parameter.grad is None:
                feedback.give_back(names[parameter], 0, mean)
