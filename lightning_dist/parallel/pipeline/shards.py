"""Stages whose parameters, gradients and optimizer state are spread over the ranks that hold the same ones.

Note [Gathered while a batch runs]
    A schedule walks a stage once a micro-batch, and its backward perhaps in two parts, so parameters are gathered
    before it begins, all of the rank's stages, and kept until a stage has its last gradient. FSDP2 is silent in
    between: gradients of all micro-batches add up in the gathered parameters, as autograd leaves them, and are handed
    over once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.parallel.children import Owners, callable_children
from lightning_dist.parallel.fsdp_groups import groups_of, params_of, silence_calls
from lightning_dist.parallel.full_tensors import FullTensors
from lightning_dist.parallel.module_tree import has_forward
from lightning_dist.parallel.pipeline.cut import Cut
from lightning_dist.parallel.pipeline.layers import Layer
from lightning_dist.parallel.pipeline.stage import LayerStage
from lightning_dist.parallel.pipeline.staged_model import StagedModel
from lightning_dist.parallel.sharded import Sharded


def stage_owners(staged: StagedModel) -> Owners:
    """What of this rank's stages is sharded, each for itself: the modules of their layers."""
    cut = staged.cut
    modules = _owners_at(cut, staged.gather.position)
    counts = Counter(p for module in modules for p in set(module.parameters()))
    here = [p for p in staged.module.parameters() if staged.is_here(p)]
    whole = {parameter for parameter in here if counts[parameter] != 1} | _whole_somewhere(cut)
    return Owners(tuple(modules), frozenset(whole), staged.absent)


def _whole_somewhere(cut: Cut) -> set[nn.Parameter]:
    """Parameters that several ranks of a pipeline hold, and that cannot be sharded on one of them: so on none."""
    found: set[nn.Parameter] = set()
    counts: dict[int, Counter[nn.Parameter]] = {}
    for holders, parameters in cut.shared().items():
        for position in holders:
            if position not in counts:
                counts[position] = Counter(p for m in _owners_at(cut, position) for p in set(m.parameters()))
            found.update(parameter for parameter in parameters if counts[position][parameter] != 1)
    return found


def _owners_at(cut: Cut, position: int) -> list[nn.Module]:
    stages = [stage for stage, at in enumerate(cut.positions) if at == position]
    return _outermost([module for stage in stages for layer in cut.layers_of(stage) for module in _callable(layer)])


def _callable(layer: Layer) -> Iterator[nn.Module]:
    for module in layer.modules:
        if not has_forward(module):
            yield from callable_children(module)
        elif next(module.parameters(), None) is not None:
            yield module


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Each once, without those inside others."""
    inner = {below for module in modules for below in module.modules() if below is not module}
    return [module for module in dict.fromkeys(modules) if module not in inner]


class ShardedStages:
    """Gathers the stages of one rank for a batch, and hands their gradients over; every rank makes it.

    Args:
        staged: The model, cut into stages.
        sharded: The same, its stages sharded.
        originals: Parameter as the cut knows it -> its name in ``sharded``, for all that are.
    """

    def __init__(self, staged: StagedModel, sharded: Sharded, originals: Mapping[nn.Parameter, str]) -> None:
        self._staged = staged
        self._sharded = sharded
        self._is_running = False
        self._done: set[int] = set()  # stages that have their last gradient
        silence_calls(sharded, lambda: self._is_running)
        groups = groups_of(sharded)
        inside = {stage.stage_index: set(stage.submod.modules()) for stage in staged.stages}
        self._stage_of = [next(i for i, held in inside.items() if group.modules[0] in held) for group in groups]
        sharded.reduction.order = sorted(range(len(groups)), key=lambda index: (-self._stage_of[index], -index))
        present = dict(sharded.named_parameters())
        self._replaced: dict[Tensor, Tensor] = {
            original: present[name] for original, name in originals.items() if present[name] is not original
        }
        gathered: dict[Tensor, Tensor] = {param.sharded_param: param._unsharded_param for param in params_of(sharded)}
        staged.follow(self._replaced, shown={old: gathered[new] for old, new in self._replaced.items()})

    # -- training ------------------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Around a batch: all parameters are there; collective. See Note [Gathered while a batch runs]."""
        with self._sharded.gathered():
            self._is_running = True
            self._done.clear()
            try:
                yield
            finally:
                self._is_running = False

    def on_last_gradient(self, stage: LayerStage) -> None:
        """A stage is done: its sums start, unless those of one that should be done before it have not."""
        self._done.add(stage.stage_index)
        self._sharded.reduction.hand_over(lambda index: self._stage_of[index] in self._done)

    def finish(self) -> None:
        """The schedule is over: wait for the sums, if this batch is to be summed."""
        self._sharded.reduction.finish_schedule()
        self._sharded.reshard_at_end()

    def no_sync(self) -> AbstractContextManager[None]:
        """A window of accumulation goes on."""
        return self._sharded.no_sync()

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """See :meth:`Sharded.check_optimizers`."""
        self._sharded.check_optimizers(optimizers)

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def begin_evaluation(self, *, alike: bool) -> None:
        """Before batches without gradients; see :meth:`Sharded.begin_evaluation`."""
        self._sharded.begin_evaluation(alike=alike, later=False)

    def end_evaluation(self) -> None:
        """After them."""
        self._sharded.end_evaluation()

    # -- whole ---------------------------------------------------------------------------------------------------------

    def state_dict_of(self, make: Callable[[], dict[str, Any]], *, keeps: bool, gathers_for: bool) -> dict[str, Any]:
        """A state of the module for a checkpoint: whole tensors in CPU memory; collective.

        Args:
            make: Makes it, by ``state_dict()``.
            keeps: Whether this rank wants the values.
            gathers_for: Whether a rank of its pipeline does.
        """
        hooks = self._staged.hooks
        return self._sharded.state_dict_of(lambda: hooks.state_dict_of(make, keep=keeps), keep=gathers_for)

    @property
    def full(self) -> FullTensors:
        """The whole tensors of this rank's stages."""
        return self._sharded.full

    @contextmanager
    def as_held(self) -> Iterator[None]:
        """Inside, a state of the module has what this rank holds; nothing is sent."""
        with self._staged.hooks.as_held(), self._sharded.as_held():
            yield

    def optimizer_state(self, optimizer: torch.optim.Optimizer, *, keeps: bool, gathers_for: bool) -> dict[str, Any]:
        """An optimizer's state, whole; collective. See :meth:`state_dict_of`."""
        own = self._sharded.full.optimizer_state(optimizer, keep=gathers_for)
        return self._staged.gather.optimizer_state(own, keep=keeps)

    def cut_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's shards of a state that holds its stages' parameters."""
        return self._sharded.full.cut_optimizer_state(optimizer, state)

    def release(self, *, whole: bool) -> None:
        """Undo the sharding; the stages stay cut. Collective if ``whole``."""
        self._is_running = False
        self._sharded.release(whole=whole)
        self._staged.follow({new: old for old, new in self._replaced.items()})
