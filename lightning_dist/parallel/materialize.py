"""Parameters on the meta device get memory and values, one module at a time, alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from lightning_dist.errors import ConfigError


def is_on_meta(module: nn.Module) -> bool:
    """Whether a parameter or buffer has no memory yet."""
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def materialize(
    module: nn.Module,
    device: torch.device,
    *,
    skip: Iterable[nn.Module] = (),
    made: Callable[[Tensor, Tensor], None] = lambda before, after: None,
) -> None:
    """Give what is on the meta device memory on ``device``, and the values of its module's ``reset_parameters``.

    Values are drawn from torch's generator, submodule by submodule; ranks whose generators are alike get the same.

    Args:
        module: Its submodules are visited in their order.
        device: Where the parameters are to live.
        skip: Submodules that are left alone, with all below them.
        made: Called with each tensor as it was on the meta device, and as it is now, before the next submodule's.

    Raises:
        ConfigError: A submodule cannot say what its values are.
    """
    skipped = {id(inner) for outer in skip for inner in outer.modules()}
    visited = [(name, m) for name, m in module.named_modules() if id(m) not in skipped]
    ties = _ties([m for _, m in visited])
    for name, submodule in visited:
        own = [*submodule.parameters(recurse=False), *submodule.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in own):
            continue
        reset = getattr(submodule, "reset_parameters", None)
        if not callable(reset) or not all(tensor.is_meta for tensor in own):
            reason = "some of its tensors have values already" if callable(reset) else "it has no reset_parameters()"
            raise ConfigError(
                f"{name or type(module).__name__} ({type(submodule).__name__}) was made on the meta device, but its "
                f"values cannot be made: {reason}; give the class a reset_parameters() that sets all its parameters "
                "and buffers, or make it outside of torch.device('meta')"
            )
        before = _own_tensors(submodule)
        submodule.to_empty(device=device, recurse=False)
        reset()
        after = _own_tensors(submodule)
        for path, tensor in before.items():
            made(tensor, after[path])
    for places in ties:
        first, name = places[0]
        for submodule, other in places[1:]:
            setattr(submodule, other, getattr(first, name))


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def _ties(modules: Iterable[nn.Module]) -> list[list[tuple[nn.Module, str]]]:
    """Where parameters on the meta device are used more than once; memory would tear them apart."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                places.setdefault(id(parameter), []).append((module, name))
    return [users for users in places.values() if len(users) > 1]
