"""Hooks that look at gradients which are spread over ranks (Lightning's ``grad_norm``) see plain numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lightning.pytorch.plugins.precision import Precision

from lightning_dist.parallel.used_shards import WholeNumbers

_CALLS = ("_after_closure", "post_backward")  # they call on_before_optimizer_step, and on_after_backward


def hooks_see_whole_numbers(plugin: Precision, *, finish: Callable[[], None] | None = None) -> None:
    """Around the hooks that the Trainer's plugin calls.

    Args:
        plugin: The Trainer's.
        finish: Called after each backward, before the hooks: what makes gradients what they are to be.
    """
    vars(plugin).update({name: _with_whole_numbers(getattr(plugin, name)) for name in _CALLS})
    if finish is not None:
        plugin.post_backward = _after(finish, plugin.post_backward)  # type: ignore[method-assign]


def hooks_as_before(plugin: Precision) -> None:
    """Undo :func:`hooks_see_whole_numbers`. Safe to call twice."""
    for name in _CALLS:
        vars(plugin).pop(name, None)


def _after(first: Callable[[], None], call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        first()
        return call(*args, **kwargs)

    return called


def _with_whole_numbers(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        with WholeNumbers():
            return call(*args, **kwargs)

    return called
