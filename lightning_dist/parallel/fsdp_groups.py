"""What the library reads and hooks inside FSDP2 (torch 2.13), in one place.

FSDP2 keeps one parameter group for each module it was applied to; its public interface does not say when a group's
gradients are complete, which of its parameters got one, or where a gradient lies in the group's sum.

Note [Calls of a group]
    ``pre_forward`` runs before each forward of the group's module. In backward, ``pre_backward`` runs when a gradient
    reaches one of its outputs, and ``post_backward`` when the gradients of its inputs are done; where no input wants a
    gradient (the first block), and for the root, FSDP2 runs it in a callback at the end of backward. A module that is
    called twice before a backward gets both twice. ``post_backward`` sums what has been accumulated, so it must do so
    in the last of its calls only.

Note [The end of a backward]
    FSDP2 queues what it does at the end of a backward on the graph task in which a gradient first comes to one of its
    modules. With reentrant checkpoints, and where ``autograd.grad`` is called inside a step, that task is an inner one,
    and its end comes too early. So FSDP2 is told that its callback is queued already, and :func:`end_backward` calls
    it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState, is_bw
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


def names_of_groups(root: nn.Module) -> list[str]:
    """What the groups' modules are called below the root, in the order of :func:`groups_of`."""
    names = {module: name.removeprefix("module").lstrip(".") for name, module in root.named_modules()}
    return [
        names[module] or "the rest" for module in sharded_modules(root) for _ in state_of(module)._fsdp_param_groups
    ]


def params_of(root: nn.Module) -> list[ShardedParam]:
    """All sharded parameters, each once."""
    return [param for group in groups_of(root) for param in group.fsdp_params]


Place = tuple[nn.Module, str]
"""A module, and the name of a parameter in it."""


def places_of_parameters(root: nn.Module) -> dict[Place, list[Place]]:
    """Each place where a parameter is, and all places where the same one is."""
    users: dict[nn.Parameter, list[Place]] = {}
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            users.setdefault(parameter, []).append((module, name))
    return {place: places for places in users.values() for place in places}


def adopt_ties(params: Iterable[ShardedParam], places: dict[Place, list[Place]]) -> None:
    """Let shards take also the places outside of their group where the parameter was; only the group's are FSDP2's.

    Args:
        params: Sharded just now.
        places: By :func:`places_of_parameters`, before.
    """
    for param in params:
        info = param._module_info
        known = {(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)}
        for module, name in places.get((info.module, info.param_name), []):
            if (module, name) not in known:
                info.shared_modules.append(module)
                info.shared_param_names.append(name)
                module._parameters[name] = param.sharded_param


def trained(group: ParamGroup) -> list[ShardedParam]:
    """The group's parameters that want gradients now."""
    return [param for param in group.fsdp_params if param.sharded_param.requires_grad]


def in_backward() -> bool:
    """Whether a backward goes on, so that a forward is one that recomputes."""
    return bool(is_bw())


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


def own_end_of_backward(root: nn.Module) -> None:
    """Leave the end of each backward to :func:`end_backward`; see Note [The end of a backward]."""
    for module in sharded_modules(root):
        state_of(module)._state_ctx.post_backward_final_callback_queued = True


def end_backward(root: nn.Module) -> None:
    """Do what FSDP2 does at the end of a backward, for the outermost modules that one came to."""
    for module in sharded_modules(root):
        state = state_of(module)
        if state._is_root and any(_was_reached(inner) for inner in state._state_ctx.all_states):
            state._root_post_backward_final_callback()
            state._state_ctx.post_backward_final_callback_queued = True


def shows_shards(group: ParamGroup) -> bool:
    """Whether modules have the group's shards as parameters."""
    infos = [(param._module_info, param.sharded_param) for param in group.fsdp_params]
    return all(info.module._parameters[info.param_name] is shard for info, shard in infos)


def end_inner_backward(root: nn.Module, *, reshard: bool) -> None:
    """Put modules that a backward inside a forward came to back to where they were; nothing is handed over.

    Args:
        root: Those in it whose own forward goes on stay as they are.
        reshard: Let go of parameters as after a forward.
    """
    for module in sharded_modules(root):
        state = state_of(module)
        for group in state._fsdp_param_groups:
            if group._training_state in _BACKWARD:
                group._training_state = TrainingState.FORWARD  # as FSDP2 wants it where it reshards after a forward
                if reshard:
                    group.reshard()
                group._training_state = TrainingState.IDLE
        if state._training_state in _BACKWARD:
            state._training_state = TrainingState.IDLE


_BACKWARD = (TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD)


def _was_reached(state: FSDPState) -> bool:
    return state._training_state in _BACKWARD or any(g._training_state in _BACKWARD for g in state._fsdp_param_groups)


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


def silence_calls(root: nn.Module, is_silent: Callable[[], bool]) -> None:
    """Have FSDP2 do nothing at calls of its modules, nor in a backward that comes to them, while it is to be silent."""
    for module in sharded_modules(root):
        state = state_of(module)
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()

        def before(module: nn.Module, args: Any, kwargs: Any, state: FSDPState = state) -> Any:
            return None if is_silent() else state._pre_forward(module, args, kwargs)

        def after(module: nn.Module, args: Any, output: Any, state: FSDPState = state) -> Any:
            return None if is_silent() else state._post_forward(module, args, output)

        state._pre_forward_hook_handle = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        state._post_forward_hook_handle = module.register_forward_hook(after)


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
        in_step: Whether a training step goes on, to whose forwards a backward will come; also to those without
            gradients, if they are those of a reentrant checkpoint.
        on_backward: Called when a backward comes to the group; whether it is one that sums gradients.
    """

    def __init__(
        self,
        group: ParamGroup,
        *,
        keeps_parameters: bool,
        in_step: Callable[[], bool],
        on_backward: Callable[[], bool],
    ) -> None:
        self.group = group
        self.used: set[ShardedParam] = set()
        self._keeps_parameters = keeps_parameters
        self._in_step = in_step
        self._on_backward = on_backward
        self._sums = True
        self._forwards = 0
        self._backwards = 0
        self._forced = False
        self._held: list[Any] = []  # how the group reshards after a forward, while it does not
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

    def hold(self) -> None:
        """Keep parameters gathered, and gradients to be handed over at the end, until the next backward is over."""
        if not self._held:
            self._held.append(self.group.post_forward_mesh_info)
            self.group.post_forward_mesh_info = None

    def reset(self) -> None:
        """A backward is over."""
        self._forwards = self._backwards = 0
        self._sums = True
        self.used.clear()
        if self._held:
            self.group.post_forward_mesh_info = self._held.pop()

    def release(self) -> None:
        """Watch no more."""
        for name in ("pre_forward", "pre_backward", "post_backward"):
            vars(self.group).pop(name, None)

    @property
    def _is_last(self) -> bool:
        """Whether no further call is to be waited for; unknown where a graph is walked again (no forward before it)."""
        return self._forced or (not self._held and 0 < self._forwards <= self._backwards)

    def _pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        self._forwards += self._in_step() and not in_backward()
        if self.group.is_unsharded:  # FSDP2 passes on who wants gradients only when it gathers
            for param in self.group.fsdp_params:
                param._unsharded_param.requires_grad_(param.sharded_param.requires_grad)
        return self._originals[0](*args, **kwargs)

    def _pre_backward(self, *args: Any, **kwargs: Any) -> Any:
        self._sums = self._on_backward()
        result = self._originals[1](*args, **kwargs)
        if not self._sums and torch.is_grad_enabled():  # create_graph: this backward will itself be walked
            self.hold()
        return result

    def _post_backward(self, *args: Any) -> None:
        group = self.group
        if not self._sums and not self._forced:
            group._training_state = TrainingState.POST_BACKWARD
            return
        self._backwards += 1
        if group.reduce_grads and self._is_last:
            self.used.update(param for param in trained(group) if has_gradient(param))
            self._originals[2](*args)
            return
        kept, reduces = group.reshard_after_backward, group.reduce_grads
        keeps = self._held or (reduces and self._keeps_parameters)
        group.reduce_grads, group.reshard_after_backward = False, kept and not keeps
        try:
            self._originals[2](*args)
        finally:
            group.reduce_grads, group.reshard_after_backward = reduces, kept


def has_gradient(param: ShardedParam) -> bool:
    """Whether there is a gradient that has not been handed over."""
    return param.unsharded_accumulated_grad is not None or param.unsharded_param.grad is not None


def name_of(param: ShardedParam) -> str:
    """As the user's module calls it."""
    return (param._param_fqn or "a parameter").removeprefix("module.")


def some_of(names: Sequence[str], limit: int = 8) -> str:
    """Names in a message, not too many of them."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
