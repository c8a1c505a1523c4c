"""What the library reads and hooks inside FSDP2 (torch 2.13), in one place.

FSDP2 keeps one parameter group for each module it was applied to; its public interface does not say when a group's
gradients are complete, which of its parameters got one, or where a gradient lies in the group's sum.

Note [Calls of a group]
    ``pre_forward`` runs before each forward of the group's module. In backward, ``pre_backward`` runs when a gradient
    reaches one of its outputs, and ``post_backward`` when the gradients of its inputs are done; where no input wants a
    gradient (the first block), and for the root, FSDP2 runs it in a callback at the end of backward. A module that is
    called twice before a backward gets both twice. ``post_backward`` sums what has been accumulated, so it must do so
    in the last of its calls only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import is_bw
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

ParamGroup = FSDPParamGroup
ShardedParam = FSDPParam


def state_of(module: nn.Module) -> FSDPState:
    """FSDP2's state of a module it was applied to."""
    return cast(FSDPModule, module)._get_fsdp_state()


def sharded_modules(root: nn.Module) -> list[nn.Module]:
    """The modules FSDP2 was applied to, outer ones before those inside them."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def groups_of(root: nn.Module) -> list[ParamGroup]:
    """Their parameter groups, in the order in which a forward should come to them.

    A backward completes them in reverse: the root's, whose inputs want no gradient, at the very end.
    """
    return [group for module in sharded_modules(root) for group in state_of(module)._fsdp_param_groups]


def params_of(root: nn.Module) -> list[ShardedParam]:
    """All sharded parameters, each once."""
    return [param for group in groups_of(root) for param in group.fsdp_params]


def trained(group: ParamGroup) -> list[ShardedParam]:
    """The group's parameters that want gradients now."""
    return [param for param in group.fsdp_params if param.sharded_param.requires_grad]


def initialise(root: nn.Module) -> None:
    """Do what FSDP2 puts off to the first forward, without communication.

    Afterwards every parameter has its unsharded twin (without memory), also one that no forward ever uses, so that its
    group takes part in sums like all others; and the twins are no inference tensors, though the first forward may run
    in inference mode.
    """
    for module in sharded_modules(root):
        state_of(module)._lazy_init()  # of an outer one, it includes those inside
    for group in groups_of(root):
        size = group._all_gather_process_group.size()
        for param in group.fsdp_params:
            inputs = param.all_gather_inputs
            param.init_all_gather_outputs([t.numel() for t in inputs], [t.dtype for t in inputs], size, group.device)
            param.init_unsharded_param()
            param.free_unsharded_param()


def views_of(group: ParamGroup, flat: torch.Tensor) -> Iterator[tuple[ShardedParam, torch.Tensor]]:
    """Each trained parameter's gradient in the group's sum.

    Args:
        group: All of its trained parameters took part in the sum.
        flat: This rank's part of the sum, [n].
    """
    offset = flat.storage_offset()
    for param in trained(group):
        yield param, flat.as_strided(param.sharded_size, param.contiguous_sharded_stride, offset)
        offset += param.padded_sharded_param_size.numel()


def show_shards(groups: Iterable[ParamGroup]) -> None:
    """Let modules have their shards as parameters, though what was gathered is kept for the next forward."""
    for group in groups:
        if not group.is_sharded:
            for param in group.fsdp_params:
                param._setattr_on_modules(param.sharded_param)


def show_gathered(groups: Iterable[ParamGroup]) -> None:
    """Undo :func:`show_shards`, for a forward."""
    for group in groups:
        if group.is_unsharded:
            for param in group.fsdp_params:
                param._setattr_on_modules(param._unsharded_param)


class GroupWatch:
    """Knows when a group's gradients are complete; see Note [Calls of a group]. Undone by :meth:`release`.

    Args:
        group: Whose calls are watched.
        keeps_parameters: Whether parameters stay gathered until the last of several backward passes.
        on_backward: Called when a backward comes to the group.
    """

    def __init__(self, group: ParamGroup, *, keeps_parameters: bool, on_backward: Callable[[], None]) -> None:
        self.group = group
        self.used: set[ShardedParam] = set()
        self._keeps_parameters = keeps_parameters
        self._on_backward = on_backward
        self._forwards = 0
        self._backwards = 0
        self._forced = False
        self._originals = (group.pre_forward, group.pre_backward, group.post_backward)
        group.pre_forward = self._pre_forward  # type: ignore[method-assign]
        group.pre_backward = self._pre_backward  # type: ignore[method-assign]
        group.post_backward = self._post_backward  # type: ignore[method-assign]

    def force(self) -> None:
        """Hand over the group's gradients now, whether or not a backward came to it."""
        self._forced = True
        try:
            self.group.post_backward()
        finally:
            self._forced = False

    def reset(self) -> None:
        """A backward is over."""
        self._forwards = self._backwards = 0
        self.used.clear()

    def release(self) -> None:
        """Watch no more."""
        for name in ("pre_forward", "pre_backward", "post_backward"):
            vars(self.group).pop(name, None)

    def _pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        self._forwards += torch.is_grad_enabled() and not is_bw()
        if self.group.is_unsharded:  # FSDP2 passes on who wants gradients only when it gathers
            for param in self.group.fsdp_params:
                param._unsharded_param.requires_grad_(param.sharded_param.requires_grad)
        return self._originals[0](*args, **kwargs)

    def _pre_backward(self, *args: Any, **kwargs: Any) -> Any:
        self._on_backward()
        return self._originals[1](*args, **kwargs)

    def _post_backward(self, *args: Any) -> None:
        group = self.group
        self._backwards += 1
        if not group.reduce_grads:
            self._originals[2](*args)
            return
        if self._backwards < self._forwards and not self._forced:
            kept, group.reduce_grads = group.reshard_after_backward, False
            group.reshard_after_backward = kept and not self._keeps_parameters
            try:
                self._originals[2](*args)
            finally:
                group.reduce_grads, group.reshard_after_backward = True, kept
            return
        self.used.update(param for param in trained(group) if has_gradient(param))
        self._originals[2](*args)


def has_gradient(param: ShardedParam) -> bool:
    """Whether there is a gradient that has not been handed over."""
    return param.unsharded_accumulated_grad is not None or param.unsharded_param.grad is not None
