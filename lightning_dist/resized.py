"""What becomes of batch and learning rate where training goes on with another number of ranks.

What the user has asked for is meant for the size at which the run began. That size is in each checkpoint, so every
later start compares itself with it, and a run that has its first size again is as it was.

Note [Where an accumulation window begins]
    Lightning takes an optimizer step whenever the number of batches of the epoch can be divided by
    ``accumulate_grad_batches``. Where a batch of the present size does not divide what was trained on before, the
    number of batches done is rounded, and the first step would have too few of them. So until the end of that epoch,
    windows are counted from where training goes on; the epoch's last one may be shorter, as in any epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_dist.config.checks import check_choice
from lightning_dist.config.elastic import RATES
from lightning_dist.data_module import ShardedDataModule
from lightning_dist.elastic.policy.resize import Batch, Resized, resize
from lightning_dist.errors import ConfigError

_REFERENCE, _SAVED, _IN_WINDOW = "reference", "saved", "in_window"
_COUNTED_IN_BATCHES = ("val_check_interval", "limit_train_batches")  # of the Trainer, where they are whole numbers


class FollowsSize(pl.Callback):
    """Knows the batch of the run's first size, and what the present size makes of it; base of what does follow."""

    def __init__(self) -> None:
        self._reference: Batch | None = None
        self._present: Batch | None = None
        self._saved: Batch | None = None  # what the checkpoint's counts of batches mean, until they are counted anew
        self.resized: Resized | None = None
        self._loop: Any = None  # of the epochs, while training
        self._offset = 0  # batches of the epoch before the first whole window
        self._in_window: int | None = None  # batches of its window that the checkpoint has done

    def state_dict(self) -> dict[str, Any]:
        """The batch of the first size, and of the present one; how many batches of the next step are done."""
        if self._reference is None or self._present is None:
            return {}
        done = 0 if self._loop is None else self._loop.batch_progress.current.ready - self._offset
        in_window = done % self._present.accumulation
        return {_REFERENCE: asdict(self._reference), _SAVED: asdict(self._present), _IN_WINDOW: in_window}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Compare the present size with the first one; before optimizers and loaders are made."""
        state = checkpoint.get("callbacks", {}).get(self.state_key, {})
        if trainer.state.fn != "fit" or _REFERENCE not in state:
            return
        self._reference, self._saved = _batch_of(state[_REFERENCE]), _batch_of(state[_SAVED])
        self._in_window = state.get(_IN_WINDOW)
        self._follow(trainer, self._reference)

    def begin_resized(self, trainer: pl.Trainer, ranks: int) -> None:
        """See :class:`~lightning_dist.restarting.ComparesSizes`."""
        self._reference = replace(_present(trainer), ranks=ranks)
        self._follow(trainer, self._reference)

    def _follow(self, trainer: pl.Trainer, reference: Batch) -> None:
        self.resized = self.resize(trainer, reference)
        if self.resized.batch != reference:
            rank_zero_info(f"hierdist: {self.resized.sentence}")
        self.apply(trainer, self.resized)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Where nothing has said what the first size is, it is this one. Batches that are done count in this size."""
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):  # it does not know that this step is saved, and would in the next
                callback._last_global_step_saved = trainer.global_step
        self._present, self._loop = _present(trainer), trainer.fit_loop.epoch_loop
        self._begin_with_whole_window()
        if self._reference is None:
            self._reference = self._present
        saved, self._saved = self._saved, None
        if saved is not None:
            _count_anew(trainer, saved, self._present)
            if saved != self._present:
                self._in_window = 0  # gradients of a part of a step are in no checkpoint

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """See Note [Where an accumulation window begins]; loaders have said by now how many batches are done."""
        in_window, self._in_window = self._in_window, None
        if in_window is None:
            return
        done = self._loop.batch_progress.current.ready - 1
        self._offset = (done - in_window) % trainer.accumulate_grad_batches if done else 0
        if self._offset:
            self._loop._accumulated_batches_reached = self._is_window_over

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The next epoch begins with a whole window."""
        self._begin_with_whole_window()

    def _begin_with_whole_window(self) -> None:
        self._offset = 0
        vars(self._loop).pop("_accumulated_batches_reached", None)

    def _is_window_over(self) -> bool:
        assert self._present is not None
        return bool((self._loop.batch_progress.current.ready - self._offset) % self._present.accumulation == 0)

    def resize(self, trainer: pl.Trainer, reference: Batch) -> Resized:
        """What the present size makes of the batch."""
        raise NotImplementedError

    def apply(self, trainer: pl.Trainer, resized: Resized) -> None:
        """Let it be so."""


class ScaledRate(FollowsSize):
    """Keeps the batch of a rank at another number of ranks, and lets the learning rate follow the global batch.

    The rate is multiplied inside the optimizer's step only: schedulers, checkpoints and loggers go on with the rate of
    the first size, and any scheduler works. :class:`~lightning_dist.strategy.HierDistStrategy` adds it by itself for
    ``elastic.batch=per_rank``; with other strategies, add it to the Trainer.

    Args:
        rate: ``linear`` (Goyal et al. 2017, arXiv:1706.02677), ``sqrt`` (Krizhevsky 2014, arXiv:1404.5997) or ``none``.

    Attributes:
        resized: The present size beside the first one; ``None`` before a checkpoint was loaded.
    """

    def __init__(self, rate: str = "linear") -> None:
        check_choice("rate", rate, RATES)
        super().__init__()
        self._rate = rate
        self._hooks: list[Any] = []
        self._restoring: list[Callable[[], None]] = []

    @property
    def factor(self) -> float:
        """What the learning rate is multiplied by."""
        return 1.0 if self.resized is None else self.resized.rate_factor

    def resize(self, trainer: pl.Trainer, reference: Batch) -> Resized:
        """The same batch of a rank, and another learning rate."""
        return resize(reference, _present(trainer).ranks, mode="per_rank", rate=self._rate)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the factor into the optimizers' steps."""
        super().on_train_start(trainer, pl_module)
        self._release()
        if self.factor != 1:
            for optimizer in trainer.optimizers:
                self._watch(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take it out again."""
        self._release()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Likewise."""
        self._release()

    def _watch(self, optimizer: Optimizer) -> None:
        rates: list[Any] = []

        def scale(*_: Any) -> None:
            rates[:] = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self.factor

        def restore(*_: Any) -> None:
            for group, rate in zip(optimizer.param_groups, rates, strict=False):  # none outside of a step
                group["lr"] = rate
            rates.clear()

        self._restoring.append(restore)  # where the step's closure raises, the second hook is not called
        self._hooks += [optimizer.register_step_pre_hook(scale), optimizer.register_step_post_hook(restore)]

    def _release(self) -> None:
        hooks, self._hooks = self._hooks, []
        restoring, self._restoring = self._restoring, []
        for restore in restoring:
            restore()
        for hook in hooks:
            hook.remove()


class KeptBatch(FollowsSize):
    """Keeps the global batch at another number of ranks: by accumulation, and by smaller batches of ranks if need be.

    Args:
        is_cut: Whether a rank's batch is cut into parts by something else, and so has to keep its size.
    """

    def __init__(self, *, is_cut: bool = False) -> None:
        super().__init__()
        self._is_cut = is_cut
        self._asked: dict[str, Any] = {}  # what the user has given the Trainer

    def resize(self, trainer: pl.Trainer, reference: Batch) -> Resized:
        """The same global batch."""
        is_fixed = self._is_cut or not isinstance(_datamodule(trainer), ShardedDataModule)
        return resize(reference, _present(trainer).ranks, mode="keep", fixed_micro_batch=is_fixed)

    def apply(self, trainer: pl.Trainer, resized: Resized) -> None:
        """Before optimizers and loaders are made."""
        old, new = resized.reference, resized.batch
        if any(isinstance(each, GradientAccumulationScheduler) for each in trainer.callbacks):  # type: ignore[attr-defined]
            rank_zero_warn(
                "GradientAccumulationScheduler says how often gradients are accumulated, so the global batch is not "
                "kept; write elastic.batch=per_rank"
            )
            return
        trainer.accumulate_grad_batches = new.accumulation
        data = _datamodule(trainer)
        if isinstance(data, ShardedDataModule):
            data.batch_size = new.micro_batch
        ratio = old.ranks * old.micro_batch / (new.ranks * new.micro_batch)
        for name in _COUNTED_IN_BATCHES:
            count = self._asked.setdefault(name, getattr(trainer, name))
            if count and isinstance(count, int) and not isinstance(count, bool):
                setattr(trainer, name, max(1, round(count * ratio)))


def _present(trainer: pl.Trainer) -> Batch:
    """Where nothing says how many samples a batch has, it counts as one."""
    part = trainer.distributed_sampler_kwargs
    data = _datamodule(trainer)
    size = data.batch_size if isinstance(data, ShardedDataModule) else 1
    return Batch(part["num_replicas"] if part else 1, size, trainer.accumulate_grad_batches)


def _count_anew(trainer: pl.Trainer, saved: Batch, present: Batch) -> None:
    """Count batches that are done, in this epoch and in all, as if each had had the present size.

    Checkpoints are saved between two steps, and the next step has all of its batches in the present size, too.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    if saved == present:
        return
    ratio = saved.global_size / present.global_size  # of steps
    for counted in (progress.total, progress.current):
        steps = counted.ready / saved.accumulation
        moved = round(steps * ratio) * present.accumulation - counted.ready
        for name in ("ready", "started", "processed", "completed"):  # a batch under way stays one batch under way
            setattr(counted, name, getattr(counted, name) + moved)


def _datamodule(trainer: pl.Trainer) -> Any:
    return trainer.datamodule  # type: ignore[attr-defined]  # set by its data connector


def _batch_of(state: Any) -> Batch:
    if not isinstance(state, Mapping):
        raise ConfigError(f"the checkpoint's reference batch is none: {state!r}")
    return Batch(**{name: int(state[name]) for name in ("ranks", "micro_batch", "accumulation")})
