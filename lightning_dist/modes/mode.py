"""What a parallel mode does at each point of a Trainer's call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from lightning_dist.build import RunContext
from lightning_dist.comm.agreement import Agreement
from lightning_dist.comm.feedback import Feedback
from lightning_dist.config import ParallelConfig, SyncConfig
from lightning_dist.modes.local_state import LocalState
from lightning_dist.parallel.held_state import HeldState
from lightning_dist.topology.layout import Axes, Layout

Seat = tuple[int, int]
"""Place in a group, and its size."""


@dataclass(frozen=True)
class Setting:
    """What a mode works in.

    Attributes:
        run: Of the present process group.
        parallel: Mode and options.
        sync: How gradients travel.
        ddp_arguments: Further arguments of :class:`~torch.nn.parallel.DistributedDataParallel`, as the user gave them.
        precision: The Trainer's plugin.
        agreement: How ranks take small decisions alike; ``None`` for one rank.
        announce: Says once, on rank 0, which way things go.
    """

    run: RunContext
    parallel: ParallelConfig
    sync: SyncConfig
    ddp_arguments: Mapping[str, object]
    precision: Precision
    agreement: Agreement | None
    announce: Callable[[str], None]

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """Those that a checkpoint is recorded with."""
        return {"parallel": asdict(self.parallel), "sync": asdict(self.sync)}


class Mode:
    """Connects a module to other ranks, from :meth:`wrap` or :meth:`place` to :meth:`close`.

    The sequence of calls, on every rank: :meth:`wrap` in a fit, :meth:`place` in any other call of the Trainer; around
    each backward :meth:`before_backward`, :meth:`running_backward` and :meth:`after_backward`, inside :meth:`no_sync`
    where gradients accumulate; for each evaluation :meth:`begin_evaluation`, :meth:`evaluate` for each batch,
    :meth:`end_evaluation`; at last :meth:`release` and :meth:`close`.

    Args:
        setting: What it works in.
        module: The user's.
    """

    def __init__(self, setting: Setting, module: pl.LightningModule) -> None:
        self.setting = setting
        self.module = module

    def wrap(self, trainer: pl.Trainer) -> nn.Module:
        """The module made ready for a fit, as it is to be called; collective."""
        raise NotImplementedError

    def place(self, trainer: pl.Trainer) -> nn.Module:
        """The module made ready for an evaluation without a fit, as it is to be called; collective."""
        raise NotImplementedError

    @property
    def needs_rewrap(self) -> bool:
        """Whether other parameters want gradients than those it was wrapped for. Drop the wrapper, then wrap anew."""
        return False

    def rewrap(self) -> nn.Module:
        """Wrap again; collective."""
        raise NotImplementedError

    def begin_training(self, trainer: pl.Trainer) -> None:
        """A fit begins to train; its data are at hand."""

    def begin_batch(self, batch_idx: int) -> None:
        """A batch to train on comes.

        Args:
            batch_idx: Its number in the epoch.
        """

    def training_step(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The module's training step, as ``call`` runs it."""
        return call(*args, **kwargs)

    def before_backward(self, loss: torch.Tensor) -> None:
        """A backward begins."""

    def running_backward(self) -> AbstractContextManager[None]:
        """Around a backward, between :meth:`before_backward` and :meth:`after_backward`."""
        return nullcontext()

    def after_backward(self) -> None:
        """A backward is done."""

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks whose values a reduction counts; ``None``: all, since each reads other data."""
        return None

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients are left for a later backward to synchronise."""
        return nullcontext()

    def explaining(self) -> AbstractContextManager[None]:
        """Around the user's steps and backward: what torch says of the mode is said in the user's words."""
        return nullcontext()

    def gradient_norm(self, norm_type: float) -> torch.Tensor:
        """The norm of all gradients of the module as one vector; collective where they are spread."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return nn.utils.get_total_norm(gradients, norm_type)

    def begin_evaluation(self, num_batches: list[int | float]) -> None:
        """Batches without gradients come.

        Args:
            num_batches: Of each loader; infinite where it cannot say.
        """

    def evaluate(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """One of the module's steps without gradients, by name."""
        return getattr(self.module, step)(*args, **kwargs)

    def end_evaluation(self) -> None:
        """They are over."""

    def end_training(self) -> None:
        """A fit has trained its last batch."""

    def check_optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Refuse optimizers that would step nothing.

        Raises:
            ConfigError: One holds parameters that are not the module's any more.
        """

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The module's state for a checkpoint, as ``make`` makes it; whole tensors, collective."""
        return make()

    def optimizer_state(self, optimizer: Any, make: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """An optimizer's state for a checkpoint, as ``make`` makes it; whole tensors, collective."""
        return make(optimizer)

    @property
    def local_state(self) -> LocalState | None:
        """What a checkpoint holds of workers that train apart; ``None`` where all train together."""
        return None

    def held_state(self) -> HeldState:
        """What this rank holds of the state; nothing is sent."""
        cluster = self.setting.run.cluster
        layout = Layout.in_rank_order(cluster, Axes(dp_replicate=cluster.world_size))
        return HeldState(self.module, layout, self.setting.run.rank)

    def forget(self) -> None:
        """The state that training goes on from is not that of the steps so far: a search has ended, inside of a fit."""

    def has_taken(self) -> None:
        """A checkpoint has said where workers that train apart are."""

    @property
    def feedback(self) -> Feedback | None:
        """What codecs have lost of gradients and is to be sent still; ``None`` where they lose nothing."""
        return None

    def hand_on(self, feedback: Feedback) -> bool:
        """Add to the next gradients what another run has left owed, though this one loses nothing.

        Args:
            feedback: From now on the mode's; empty yet.

        Returns:
            Whether this mode can.
        """
        return False

    @property
    def feedback_seat(self) -> Seat:
        """This rank's place among those of whom any may send what is owed of a parameter it holds."""
        return self.setting.run.rank, self.setting.run.cluster.world_size

    def as_held(self) -> AbstractContextManager[None]:
        """Inside, ``state_dict()`` has what this rank holds; nothing is sent."""
        return nullcontext()

    def optimizer_states_to_load(self, optimizers: list[Any], states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """This rank's part of whole states."""
        return states

    def abort(self, reason: str) -> None:
        """This rank fails: nobody should wait for it, and its own threads should end."""

    @property
    def outlives_call(self) -> bool:
        """Whether the module cannot be what it was before :meth:`wrap`, so that the mode stays open for later calls."""
        return False

    def release(self, *, failed: bool) -> None:
        """Make the module what it was before :meth:`wrap`; collective unless ``failed``. Safe to call twice.

        Args:
            failed: Other ranks may be gone, so nothing may wait for them.
        """

    def close(self) -> None:
        """End lanes and groups. Safe to call twice."""


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Out of Lightning's wrapper."""
    inner: torch.optim.Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return inner
