"""Which modules of a LightningModule are sharded for themselves, where its own forward has several backward passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

from lightning_dist.parallel.module_tree import has_forward


def callable_children(module: nn.Module) -> list[nn.Module]:
    """Its children that hold parameters; of those that cannot be called, such as a ModuleList, the children instead."""
    found: dict[nn.Module, None] = {}
    for child in module.children():
        if has_forward(child):
            if next(child.parameters(), None) is not None:
                found[child] = None
        else:
            found.update(dict.fromkeys(callable_children(child)))
    return list(found)


def without_owner(module: nn.Module, owners: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """Name -> parameter, of those that are not in exactly one of some modules: the module's own, and tied ones."""
    count = Counter(parameter for owner in owners for parameter in owner.parameters())
    return {name: parameter for name, parameter in module.named_parameters() if count[parameter] != 1}
