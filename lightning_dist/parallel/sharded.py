"""A module whose parameters, gradients and optimizer state are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_dist.comm.collectives import RankGroup
from lightning_dist.errors import CombinationError, ConfigError
from lightning_dist.parallel.buffers import BufferSync
from lightning_dist.parallel.copies import RefusedCopies
from lightning_dist.parallel.fsdp_groups import ParamGroup, groups_of, show_gathered, show_shards
from lightning_dist.parallel.full_tensors import StateDictHooks
from lightning_dist.parallel.outside_calls import OutsideCalls
from lightning_dist.parallel.reduction import GradientReduction
from lightning_dist.parallel.shard_tensors import ShardTensors
from lightning_dist.parallel.unsharding import unshard_for_good, unshard_without_values


@dataclass(frozen=True)
class ShardPolicy:
    """What is sharded, and when.

    Attributes:
        keeps_parameters: Parameters are gathered once, at the start of a forward, and kept until the gradients are
            summed; else a block's are gathered for its forward and once more for its backward.
        sums_each_micro_step: Under accumulation gradients are summed into shards after each micro-batch; else they are
            kept whole and summed once.
        replicates: Shards are spread over the ranks of a host, and each host holds all of them.
    """

    keeps_parameters: bool
    sums_each_micro_step: bool
    replicates: bool = False


class Sharded(nn.Module):
    """The wrapper through which a sharded module is called. :func:`~lightning_dist.parallel.zero.shard` makes it.

    Args:
        module: Has the parameters.
        operation: Opens the seam around an operation of the default process group, given the operation's name.
        policy: What is sharded, and when.
        by_child: Each child of the module is sharded for itself, because a step has several backward passes.
        broadcast_buffers: Buffers follow rank 0 at the first forward of each window.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        operation: Callable[[str], AbstractContextManager[None]],
        policy: ShardPolicy,
        by_child: bool,
        broadcast_buffers: bool,
    ) -> None:
        super().__init__()
        self.module = module
        self._policy = policy
        self.by_child = by_child
        self._buffer_sync = BufferSync(module, operation, enabled=broadcast_buffers)
        self._is_whole = False  # all parameters are gathered, for a validation in which ranks differ
        self._groups: list[ParamGroup] = []
        self._resharding: list[tuple[ParamGroup, Any]] = []  # how groups reshard when they are not kept whole
        self.description = ""  # what was chosen to be sharded, in lines of text
        self._originals: dict[str, nn.Parameter] = {}
        self.was_whole = True  # whether the module was whole on this rank, and can be again
        self.reduction: GradientReduction
        self.full: ShardTensors
        self._hooks: StateDictHooks
        self._outside: OutsideCalls
        self._copies: RefusedCopies

    def complete(
        self,
        *,
        reduction: GradientReduction,
        full: ShardTensors,
        originals: Mapping[str, nn.Parameter],
        was_whole: bool,
    ) -> None:
        """Take what could be made only once FSDP2 had been applied."""
        self.reduction = reduction
        self.full = full
        self._originals = dict(originals)
        self.was_whole = was_whole
        self._hooks = StateDictHooks(self.module, full)
        self._outside = OutsideCalls(self)
        self._copies = RefusedCopies(self)
        self._groups = groups_of(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own; in training, buffers are brought to rank 0's state first."""
        self.reduction.in_step = torch.is_grad_enabled() and self.module.training
        self._buffer_sync.before_forward()
        evaluates = not torch.is_grad_enabled()
        if evaluates:
            show_gathered(self._groups)
        ahead = (self._policy.keeps_parameters and not self.by_child) or self._is_whole
        if ahead:
            self._gather_ahead()
        self._outside.is_step = True
        try:
            outputs = self.module(*args, **kwargs)
        finally:
            self._outside.is_step = self.reduction.in_step = False
        if ahead:  # also what this rank did not use: in the next forward all ranks must gather the same again
            for group in self._groups:
                group.wait_for_unshard()
        if evaluates:  # whoever changes weights at the end of an evaluation changes the shards
            show_shards(self._groups)
        return outputs

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, modules show whole parameters, and calls of them gather nothing; collective.

        Afterwards parameters stay gathered, until a backward's end or :meth:`let_go`. Where there are no gradients,
        modules show their shards again: whoever changes weights changes these.
        """
        show_gathered(self._groups)
        self._gather_ahead()
        for group in self._groups:
            group.wait_for_unshard()
            if torch.is_grad_enabled():
                for param in group.fsdp_params:  # FSDP2 passes on who wants gradients only when it gathers
                    param._unsharded_param.requires_grad_(param.sharded_param.requires_grad)
        self._outside.is_step = True
        try:
            yield
        finally:
            self._outside.is_step = False
            if not torch.is_grad_enabled():
                show_shards(self._groups)

    def reshard_at_end(self) -> None:
        """After the end of a backward: let go what is not kept for the next one of a window."""
        for group in self._groups:
            if group.reshard_after_backward:
                group.reshard()

    # -- backward -----------------------------------------------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """Whether it fits the parameters that want gradients now; FSDP2 asks them each time."""
        return True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, a window of accumulation goes on after the backward."""
        policy, reduction = self._policy, self.reduction
        reduction.crosses = not policy.replicates
        reduction.synchronises = policy.sums_each_micro_step
        reduction.ends_window = False
        for group in self._groups:
            group.reshard_after_backward = not policy.keeps_parameters
            group.reduce_grads = policy.sums_each_micro_step
        try:
            with self._buffer_sync.window():
                yield
        finally:
            reduction.crosses = reduction.synchronises = reduction.ends_window = True
            for group in self._groups:
                group.reshard_after_backward = group.reduce_grads = True

    def part(self, inside: RankGroup) -> None:
        """From now on replicas train apart.

        Args:
            inside: The ranks that share the shards, which train together.
        """
        self.reduction.part(inside)
        self._buffer_sync.part(inside.process_group)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def begin_evaluation(self, *, alike: bool, later: bool) -> None:
        """Before batches without gradients.

        Args:
            alike: Whether all ranks have as many batches; else parameters are gathered once, all together, and no batch
                needs another rank.
            later: Whether that may wait for the first batch, because each rank has one.
        """
        self.let_go()
        if not alike:
            self._is_whole = True
            for group in self._groups:
                self._resharding.append((group, group.post_forward_mesh_info))
                group.post_forward_mesh_info = None
            if not later:
                self._gather_ahead()

    def end_evaluation(self) -> None:
        """After them: nothing stays gathered, since whoever changes weights changes the shards."""
        self._is_whole = False
        self.reduction.forget()
        while self._resharding:
            group, info = self._resharding.pop()
            group.post_forward_mesh_info = info
        self.let_go()

    def let_go(self) -> None:
        """Let all gathered parameters go, also what was gathered ahead and not used."""
        self.reduction.forget()
        for group in self._groups:
            group.wait_for_unshard()
            group.reshard()

    def _gather_ahead(self) -> None:
        """Start to gather everything in one order, so that it does not matter which rank uses what when."""
        for group in self._groups:
            group.unshard(async_op=True)

    # -- buffers ------------------------------------------------------------------------------------------------------

    @property
    def syncs_buffers(self) -> bool:
        """Whether there are buffers, and it was made to keep them alike."""
        return self._buffer_sync.is_needed

    def sync_buffers(self) -> None:
        """Give every rank the buffers of rank 0, if it was made to; collective."""
        self._buffer_sync.sync()

    def check_optimizers(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Refuse optimizers of parameters as they were before the sharding: they would step nothing.

        And those that look at whole matrices.

        Raises:
            ConfigError: An optimizer holds some.
            CombinationError: An optimizer cannot step shards.
        """
        optimizers = list(optimizers)
        for optimizer in optimizers:
            if any(base.__name__ == "Adafactor" for base in type(optimizer).__mro__):
                raise CombinationError(
                    "Adafactor takes means over rows and columns of whole matrices, which torch does not do on shards: "
                    "write parallel=ddp, or torch.optim.AdamW"
                )
        names = {id(p): name.removeprefix("module.") for name, p in self._originals.items()}
        present = {id(p) for p in self.module.parameters()}
        held = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        stale = [names[i] for i in held if i in names and i not in present]
        if stale:
            raise ConfigError(
                f"an optimizer holds {stale[0]} (and {len(stale) - 1} more) as it was before the model was sharded; "
                "take parameters in configure_optimizers, from self.parameters(), not in __init__"
            )

    # -- whole again --------------------------------------------------------------------------------------------------

    def state_dict_of(self, make: Callable[[], dict[str, Any]], *, keep: bool) -> dict[str, Any]:
        """A state of the module for a checkpoint: whole tensors in CPU memory; collective.

        Args:
            make: Makes it, by ``state_dict()``.
            keep: Whether this rank wants the values.
        """
        return self._hooks.state_dict_of(make, keep=keep)

    def as_held(self) -> AbstractContextManager[None]:
        """Inside, a state of the module has shards; nothing is sent."""
        return self._hooks.as_held()

    def release(self, *, whole: bool) -> None:
        """Undo the sharding, so that the module is what it was, with the trained values; collective if ``whole``.

        Args:
            whole: Gather the parameters; else they are lost, and the module says so.
        """
        self.reduction.release()
        self._hooks.release()
        self._outside.release()
        self._copies.release()
        if whole:
            self.let_go()
            unshard_for_good(self, self.full, self._originals)
        else:
            unshard_without_values(self, self._originals)
