"""Gradients spread over ranks: clipping, by norm and by value, and numbers that hooks of users compute of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lightning.pytorch.plugins.precision import Precision

from lightning_dist.parallel.norms import GlobalNorm
from lightning_dist.parallel.used_shards import WholeNumbers


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


def show_whole_numbers(plugin: Precision) -> None:
    """Let the user's hooks that compute numbers from sharded gradients, to log them, see plain ones."""
    vars(plugin).update(
        _after_closure=_with_whole_numbers(plugin._after_closure),  # calls on_before_optimizer_step
        post_backward=_with_whole_numbers(plugin.post_backward),  # calls on_after_backward
    )


def show_numbers_as_before(plugin: Precision) -> None:
    """Undo :func:`show_whole_numbers`. Safe to call twice."""
    for name in ("_after_closure", "post_backward"):
        vars(plugin).pop(name, None)


def _with_whole_numbers(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        with WholeNumbers():
            return call(*args, **kwargs)

    return called
