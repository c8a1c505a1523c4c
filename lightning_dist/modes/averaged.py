"""Inside ``parallel=tensor``: ranks that hold the same parts of the layers average their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_dist import build
from lightning_dist.comm.feedback import Feedback
from lightning_dist.gradsync.part_average import PartAverage
from lightning_dist.modes.clipping import clip_as_before, clip_globally
from lightning_dist.modes.mode import Mode, Seat, Setting, unwrapped
from lightning_dist.modes.whole_numbers import hooks_as_before, hooks_see_whole_numbers
from lightning_dist.parallel.buffers import BufferedModule, BufferSync
from lightning_dist.parallel.full_tensors import StateDictHooks
from lightning_dist.parallel.held_state import HeldState
from lightning_dist.parallel.norms import GlobalNorm
from lightning_dist.parallel.tensor import TensorLinks, TensorParallel, keep_kinds_apart, keep_list_options
from lightning_dist.parallel.tensor.part_tensors import PartTensors
from lightning_dist.parallel.used_shards import explaining_parts


class AveragedMode(Mode):
    """Data parallelism of a module whose layers are split.

    Args:
        setting: What it works in.
        module: The user's, split.
        split: What has split it.
        links: Its groups.
    """

    def __init__(self, setting: Setting, module: pl.LightningModule, split: TensorParallel, links: TensorLinks) -> None:
        super().__init__(setting, module)
        self._links = links
        self._full = PartTensors(split, links.operation)
        self._hooks: StateDictHooks | None = None
        self._average: PartAverage | None = None
        self._buffers: BufferSync | None = None
        self._norm: GlobalNorm | None = None

    def wrap(self, trainer: pl.Trainer) -> nn.Module:
        """Get ready to average."""
        setting, links = self.setting, self._links
        if setting.ddp_arguments:
            names = ", ".join(setting.ddp_arguments)
            rank_zero_warn(f"{names}: no effect with parallel.mode=tensor; they are DistributedDataParallel's")
        vote = setting.agreement.any_of if setting.agreement is not None else list
        self._average = build.average_parts(self.module, links, parallel=setting.parallel, sync=setting.sync, vote=vote)
        self._norm = GlobalNorm(setting.run.collectives, tensor=links.tensor)
        clip_globally(setting.precision, self._norm)
        hooks_see_whole_numbers(setting.precision, finish=self.after_backward)
        self._buffers = BufferSync(self.module, setting.run.operation, enabled=setting.parallel.broadcast_buffers)
        return BufferedModule(self.place(trainer), self._buffers)

    def place(self, trainer: pl.Trainer) -> nn.Module:
        """It is where it is to be."""
        self._hooks = StateDictHooks(self.module, self._full)
        return self.module

    def check_optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """See that none takes plain tensors and parts in one list."""
        for optimizer in optimizers:
            keep_kinds_apart(optimizer)

    def gradient_norm(self, norm_type: float) -> torch.Tensor:
        """One sum over the ranks that share layers."""
        if self._norm is None:
            return super().gradient_norm(norm_type)
        return self._norm.total(self.module.parameters(), norm_type)

    def explaining(self) -> AbstractContextManager[None]:
        """Parts are no plain tensors."""
        return explaining_parts()

    def before_backward(self, loss: torch.Tensor) -> None:
        """Get ready for the gradients."""
        if self._average is not None:
            self._average.before_backward()

    def after_backward(self) -> None:
        """Wait for the averages; before ``on_after_backward``, whose hooks may look at gradients and change them."""
        if self._average is not None:
            self._average.after_backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients stay this rank's own."""
        assert self._buffers is not None, "gradients accumulate in a fit"
        with self._buffers.window():
            if self._average is None:
                yield
                return
            with self._average.no_sync():
                yield

    def begin_evaluation(self, num_batches: list[int | float]) -> None:
        """In a fit, bring buffers to rank 0's state once."""
        if self._buffers is not None:
            self._buffers.sync()

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Values on rank 0 only."""
        assert self._hooks is not None, "the module is wrapped or placed"
        return self._hooks.state_dict_of(make, keep=self.setting.run.rank == 0)

    def optimizer_state(self, optimizer: Any, make: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Values on rank 0 only."""
        return self._full.optimizer_state(unwrapped(optimizer), keep=self.setting.run.rank == 0)

    def held_state(self) -> HeldState:
        """Parts, and what is whole."""
        return HeldState(self.module, self._links.layout, self.setting.run.rank, full=self._full)

    @property
    def feedback(self) -> Feedback | None:
        """Of the lanes."""
        return None if self._links.scatter is None else self._links.scatter.feedback

    @property
    def feedback_seat(self) -> Seat:
        """Among those that hold the same parts."""
        scatter = self._links.scatter
        return super().feedback_seat if scatter is None else (scatter.index, len(scatter.members))

    def as_held(self) -> AbstractContextManager[None]:
        """Parts stay parts."""
        assert self._hooks is not None, "the module is wrapped or placed"
        return self._hooks.as_held()

    def optimizer_states_to_load(self, optimizers: list[Any], states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each rank keeps its part; how lists of tensors are treated is this run's, not the checkpoint's."""
        return [
            keep_list_options(optimizer, self._full.cut_optimizer_state(optimizer, state))
            for optimizer, state in zip(optimizers, states, strict=False)
        ]

    def release(self, *, failed: bool) -> None:
        """Let the module go."""
        clip_as_before(self.setting.precision)
        hooks_as_before(self.setting.precision)
        for part in (self._average, self._hooks):
            if part is not None:
                part.release()
        self._average = self._hooks = self._buffers = None
