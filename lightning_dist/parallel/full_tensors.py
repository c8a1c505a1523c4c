"""Between sharded and whole: what users see of a sharded model is whole, and what they load into it may be.

``state_dict()`` of any module that holds shards gathers them, so that it holds whole tensors under the original names;
all ranks must call it. ``load_state_dict()`` takes whole tensors and keeps this rank's rows. The same for the states of
optimizers, whose tensors follow their parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.hooks import RemovableHandle

from lightning_dist.comm.scattered import HierarchicalScatter
from lightning_dist.parallel.fsdp_groups import ShardedParam, name_of, params_of


class FullTensors:
    """Gathers and cuts the tensors of one sharded model. Every rank makes it.

    Args:
        root: The sharded module.
        scatter: Gathers over the ranks that share the shards.
    """

    def __init__(self, root: nn.Module, scatter: HierarchicalScatter) -> None:
        self._root = root
        self._scatter = scatter
        self._known: dict[int, ShardedParam] = {}

    def param_of(self, parameter: object) -> ShardedParam | None:
        """What FSDP2 knows of a parameter; ``None`` if it is not sharded."""
        found = self._known.get(id(parameter))
        if found is None or found.sharded_param is not parameter:
            self._known = {id(param.sharded_param): param for param in params_of(self._root)}
            found = self._known.get(id(parameter))
        return found

    def gather(self, param: ShardedParam, shard: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor that is sharded as ``param`` is; collective.

        Args:
            param: The parameter, of any shape but 0-dim.
            shard: This rank's rows of it, or of a tensor of its shape.
        """
        padded = shard.new_zeros(param.padded_sharded_param_size)
        padded[: shard.shape[0]].copy_(shard.detach())
        whole = padded.new_empty((len(self._scatter.members) * padded.shape[0], *padded.shape[1:]))
        self._scatter.all_gather(whole.view(-1), padded.view(-1), name=name_of(param)).wait()
        return whole[: param._orig_size[0]]

    def cut(self, param: ShardedParam, whole: torch.Tensor) -> DTensor:
        """This rank's rows of a whole tensor of the parameter's shape."""
        rows = param.padded_sharded_param_size[0]
        low = min(self._scatter.index * rows, whole.shape[0])
        shard = whole[low : low + rows].to(param.sharded_param.device).contiguous()
        return param.to_sharded_dtensor(shard.view(param.sharded_size))

    def optimizer_state(self, optimizer: torch.optim.Optimizer, *, keep: bool) -> dict[str, Any]:
        """``optimizer.state_dict()`` with whole tensors; collective.

        Args:
            optimizer: Of parameters of this model.
            keep: Whether this rank wants the values; the others get tensors of the same shape without memory.
        """
        state = optimizer.state_dict()
        owners = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
        whole = {index: self._whole(owners[index], entries, keep) for index, entries in state["state"].items()}
        return {**state, "state": whole}

    def cut_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """A whole optimizer state as this rank's optimizer holds it."""
        owners = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
        return {
            **state,
            "state": {index: self._cut(owners[index], entries) for index, entries in state["state"].items()},
        }

    def whole(self, value: DTensor, param: ShardedParam, *, keep: bool = True) -> torch.Tensor:
        """A sharded tensor as a whole one; collective.

        Args:
            value: Sharded as the parameter is.
            param: The parameter.
            keep: Otherwise the result has its shape and type, but no memory.
        """
        gathered = self.gather(param, value._local_tensor)
        return gathered if keep else _without_memory(gathered)

    def _whole(self, parameter: nn.Parameter, entries: Any, keep: bool) -> Any:
        param = self.param_of(parameter)
        if param is None or not isinstance(entries, Mapping):
            return entries
        return {
            name: self._whole_entry(v, param, keep).cpu() if isinstance(v, DTensor) else v
            for name, v in entries.items()
        }

    def _whole_entry(self, value: DTensor, param: ShardedParam, keep: bool) -> torch.Tensor:
        """An entry that is not of the parameter's shape (a value a row, a value a column) is spread as torch likes."""
        if value.shape == param._orig_size and value.placements == param._sharding_spec.placements:
            return self.whole(value, param, keep=keep)
        gathered = value.full_tensor()
        return gathered if keep else _without_memory(gathered)

    def _cut(self, parameter: nn.Parameter, entries: Any) -> Any:
        param = self.param_of(parameter)
        if param is None or not isinstance(entries, Mapping):
            return entries
        return {
            name: self._cut_entry(param, v) if isinstance(v, torch.Tensor) and not isinstance(v, DTensor) else v
            for name, v in entries.items()
        }

    def _cut_entry(self, param: ShardedParam, value: torch.Tensor) -> torch.Tensor:
        if value.shape == param._orig_size:
            return self.cut(param, value)
        if value.dim() == 0:  # a count of steps
            return value
        mesh, value = param._sharding_spec.mesh, value.to(param.sharded_param.device)
        if value.shape[0] != param._orig_size[0]:
            return DTensor.from_local(value, mesh, [Replicate()], run_check=False)
        rows = param.padded_sharded_param_size[0]
        shard = value[self._scatter.index * rows :][:rows].contiguous()
        return DTensor.from_local(shard, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride())


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_zeros(()).expand(tensor.shape)


class StateDictHooks:
    """Makes ``state_dict`` and ``load_state_dict`` of a sharded model, and of its parts, speak of whole tensors.

    Args:
        root: The sharded module.
        full: Its tensors.
    """

    def __init__(self, root: nn.Module, full: FullTensors) -> None:
        self.keep = True  # whether this rank wants the values of a state_dict
        self.on_cpu = False  # whether a state_dict goes to CPU memory, tensor by tensor
        self._full = full
        self._entered: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []
        for module in root.modules():
            self._handles += [
                module.register_state_dict_pre_hook(self._enter),
                module.register_state_dict_post_hook(functools.partial(self._leave)),  # torch sets an attribute on it
                module.register_load_state_dict_pre_hook(self._load),
            ]

    def release(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if module in self._entered:  # an earlier call did not come to its end
            self._entered.clear()
        self._entered.append(module)

    def _leave(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        while self._entered and self._entered.pop() is not module:
            pass
        if self._entered:
            return
        done: dict[int, torch.Tensor] = {}  # tied weights stay tied
        for name, parameter in module.named_parameters(remove_duplicate=False):
            value, param = state_dict.get(prefix + name), self._full.param_of(parameter)
            if param is None or not isinstance(value, DTensor):
                continue
            if id(param) not in done:
                whole = self._full.whole(value, param, keep=self.keep)
                done[id(param)] = whole.cpu() if self.on_cpu else whole
            state_dict[prefix + name] = done[id(param)]

    def _load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            value, param = state_dict.get(prefix + name), self._full.param_of(parameter)
            if param is None or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                continue
            if value.shape == param._orig_size:  # otherwise load_state_dict says what does not fit
                state_dict[prefix + name] = self._full.cut(param, value)
