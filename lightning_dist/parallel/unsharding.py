"""Undoing FSDP2: the module is plain again, with the parameters it had before, and may be sharded anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule

from lightning_dist.parallel.fsdp_groups import ParamGroup, ShardedParam, groups_of, sharded_modules, state_of
from lightning_dist.parallel.lost_weights import LostWeights
from lightning_dist.parallel.shard_tensors import ShardTensors

ValueOf = Callable[[ShardedParam, nn.Parameter | None], torch.Tensor]
"""The value a parameter gets, given the one that was there before, if there was one."""


def unshard_for_good(root: nn.Module, full: ShardTensors, originals: Mapping[str, nn.Parameter]) -> None:
    """Gather all parameters and take FSDP2 away; every rank calls it.

    Args:
        root: FSDP2 was applied to it and to some of its submodules.
        full: Gathers its tensors.
        originals: Name -> the parameter that was there before, which gets the values back; others get a new one.
    """
    _unshard(root, originals, lambda param, _: full.unsharded(param))


def unshard_without_values(root: nn.Module, originals: Mapping[str, nn.Parameter]) -> None:
    """Take FSDP2 away where other ranks may be gone: parameters are empty, and their modules refuse to be used."""
    sizes: dict[nn.Module, dict[str, torch.Size]] = {}
    for group in groups_of(root):
        for param in group.fsdp_params:
            for module, name in _places(param):
                sizes.setdefault(module, {})[name] = param._sharding_spec.shape  # of a split layer, too, the whole
    _unshard(root, originals, lambda param, _: torch.empty(0, dtype=param.orig_dtype))
    for module, lost in sizes.items():
        LostWeights(module, lost)


def undo_sharding(root: nn.Module, originals: Mapping[str, nn.Parameter]) -> None:
    """Take FSDP2 away where it was not applied to the end; the parameters that were there before have their values."""

    def own_value(param: ShardedParam, original: nn.Parameter | None) -> torch.Tensor:
        return original.data if original is not None else torch.empty(param._orig_size, dtype=param.orig_dtype)

    _unshard(root, originals, own_value)


@torch.no_grad()
def _unshard(root: nn.Module, originals: Mapping[str, nn.Parameter], value_of: ValueOf) -> None:
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    for group in groups_of(root):
        group._to_sharded()
        for param in group.fsdp_params:
            sharded = param.sharded_param
            parameter = originals.get(names.get(id(sharded), ""))
            value = value_of(param, parameter)
            if parameter is None:
                parameter = nn.Parameter(value, requires_grad=sharded.requires_grad)
            else:
                parameter.data = value
            parameter.requires_grad_(sharded.requires_grad)
            for module, name in _places(param):
                module._parameters[name] = parameter
            param._post_load_hook_handle.remove()
        _remove_group_hooks(group)
    for module in sharded_modules(root):
        _remove_state(module)
    for module in root.modules():
        for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            vars(module).pop(name, None)


def _places(param: ShardedParam) -> list[tuple[nn.Module, str]]:
    """Where it is, more than once if it is tied."""
    info = param._module_info
    return list(zip((info.module, *info.shared_modules), (info.param_name, *info.shared_param_names), strict=True))


def _remove_group_hooks(group: ParamGroup) -> None:
    for handles in (
        group._module_to_pre_save_state_dict_hook_handle,
        group._module_to_pre_load_state_dict_hook_handle,
    ):
        for handle in handles.values():
            handle.remove()


def _remove_state(module: nn.Module) -> None:
    state = state_of(module)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for key in (STATE_KEY, REGISTRY_KEY):
        entries = vars(module)[key]
        for name in [n for n, entry in entries.items() if entry is state or n == "fully_shard"]:
            del entries[name]
    _module_state_mapping.pop(module, None)
    module.__class__ = type(module).__mro__[FSDPModule._orig_cls_mro_index]
