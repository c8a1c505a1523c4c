"""The parameters of a module, described by plain values, for whoever computes with sizes and not with tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_dist.errors import ConfigError, unknown_option


class InventoryEntry(NamedTuple):
    """One parameter.

    Attributes:
        name: Its first name in the module.
        shape: Of the whole parameter, also if it is sharded already.
        dtype_bytes: Bytes a value.
        trainable: Whether it gets a gradient.
        block: Index of its block in the list of blocks; ``None`` if it is in none, or in several, being tied.
        tp_dim: The dim that tensor parallelism cuts; ``None`` if none.
    """

    name: str
    shape: tuple[int, ...]
    dtype_bytes: int
    trainable: bool
    block: int | None
    tp_dim: int | None


def inventory_of(
    module: nn.Module, *, blocks: Sequence[str] = (), tp_dims: Mapping[str, int] | None = None
) -> tuple[InventoryEntry, ...]:
    """Describe the parameters of a module, each once, in the order of ``named_parameters``; nothing is read of them.

    Args:
        module: On any device, ``meta`` included.
        blocks: Names of the submodules that are sharded one by one, in the order in which they run. A block may lie
            within another: a parameter belongs to the innermost. A module that is listed under two names is one block.
        tp_dims: Parameter name -> dim that tensor parallelism cuts; of a tied parameter any of its names.

    Raises:
        UnknownOptionError: The module has no such block, or no such parameter.
        ConfigError: A block is listed twice, or a parameter has no shape yet.
    """
    names_of: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    index_of = _block_indices(module, blocks)
    dims = dict(tp_dims or {})
    known = [name for names in names_of.values() for name in names]
    for name in dims:
        if name not in known:
            raise unknown_option("parameter of tp_dims", name, known)
    return tuple(
        _entry(names, parameters[key], {_innermost(name, index_of) for name in names}, dims)
        for key, names in names_of.items()
    )


def _block_indices(module: nn.Module, blocks: Sequence[str]) -> dict[str, int]:
    """Block name -> its index; names of one module share the first one's."""
    modules = dict(module.named_modules(remove_duplicate=False))
    first_index: dict[int, int] = {}
    found: dict[str, int] = {}
    for index, name in enumerate(blocks):
        if name not in modules:
            raise unknown_option("block", name, filter(None, modules))
        if name in found:
            raise ConfigError(f"block {name} is listed twice; list each block once")
        found[name] = first_index.setdefault(id(modules[name]), index)
    return found


def _innermost(name: str, index_of: Mapping[str, int]) -> int | None:
    holding = [block for block in index_of if not block or name.startswith(f"{block}.")]
    return index_of[max(holding, key=len)] if holding else None


def _entry(
    names: Sequence[str], parameter: nn.Parameter, blocks: set[int | None], tp_dims: Mapping[str, int]
) -> InventoryEntry:
    if is_lazy(parameter):
        raise ConfigError(f"parameter {names[0]} has no shape yet; run the module once before it is described")
    return InventoryEntry(
        name=names[0],
        shape=tuple(parameter.shape),
        dtype_bytes=parameter.element_size(),
        trainable=parameter.requires_grad,
        block=blocks.pop() if len(blocks) == 1 else None,
        tp_dim=next((tp_dims[name] for name in names if name in tp_dims), None),
    )
