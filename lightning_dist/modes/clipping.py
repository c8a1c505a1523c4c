"""Gradients spread over ranks: clipping, by norm and by value, and numbers that hooks of users compute of them."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.precision import Precision

from lightning_dist.parallel.norms import GlobalNorm


def clip_globally(plugin: Precision, norm: GlobalNorm) -> None:
    """Have the Trainer's plugin clip by the norm of all gradients."""

    def clip_by_norm(optimizer: Any, clip_val: float) -> None:
        norm.clip(plugin.main_params(optimizer), clip_val)

    def clip_by_value(optimizer: Any, clip_val: float) -> None:
        norm.clip_values(plugin.main_params(optimizer), clip_val)

    plugin.clip_grad_by_norm = clip_by_norm  # type: ignore[method-assign]
    plugin.clip_grad_by_value = clip_by_value  # type: ignore[method-assign]


def clip_as_before(plugin: Precision) -> None:
    """Undo :func:`clip_globally`. Safe to call twice."""
    for name in ("clip_grad_by_norm", "clip_grad_by_value"):
        vars(plugin).pop(name, None)
