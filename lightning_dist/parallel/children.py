"""Which modules of a LightningModule are sharded for themselves, where its own forward has several backward passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from lightning_dist.parallel.module_tree import has_forward


@dataclass(frozen=True)
class Owners:
    """Modules that are sharded each for itself.

    Attributes:
        modules: None inside another.
        whole: Parameters that stay whole on each rank: those in none or several of the modules, and perhaps others.
        elsewhere: Parameters that are on other ranks only.
    """

    modules: tuple[nn.Module, ...]
    whole: frozenset[nn.Parameter]
    elsewhere: frozenset[nn.Parameter] = field(default_factory=frozenset)

    def inside(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        """Those that are among the owners, or below them."""
        below = {inner for owner in self.modules for inner in owner.modules()}
        return [module for module in modules if module in below]


def child_owners(module: nn.Module) -> Owners:
    """The children of a module; parameters that are not in exactly one of them stay whole."""
    children = callable_children(module)
    return Owners(tuple(children), frozenset(without_owner(module, children).values()))


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
