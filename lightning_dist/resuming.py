"""Streamed data in Lightning's loops: their state when a checkpoint is saved, and training that goes on from one.

Note [What Lightning leaves out]
    Lightning 2.6 saves the states of loaders with its loops. It loads them only if it makes the loaders after the
    checkpoint was read, which is not so once ``trainer.estimated_stepping_batches`` was asked for, and only in the
    middle of an epoch. It counts the batches of the epoch that were done in the size that they had, and knows nothing
    of another number of ranks. And where a loader beside ours has no length, it takes one batch ahead, so that ours has
    given more than was trained on.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_dist.data.loading.loader import ShardedLoader
from lightning_dist.rank_strategy import RankStrategy


class ResumeData(pl.Callback):
    """Makes loaders of streamed data resume exactly under any strategy.

    :class:`~lightning_dist.strategy.HierDistStrategy` and :class:`~lightning_dist.data_module.ShardedDataModule` do
    this by themselves. Add it where a :class:`~lightning_dist.data.loading.loader.ShardedLoader` is given to a Trainer
    without them.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on where the checkpoint was saved, if there is one."""
        if not isinstance(trainer.strategy, RankStrategy):
            take_up(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Loaders may be others than in the epoch before."""
        for loader in _streamed(trainer.fit_loop):
            follow(trainer, loader)


def attach(trainer: pl.Trainer) -> None:
    """Let a Trainer's streamed data resume exactly. Safe to call twice."""
    if not any(isinstance(callback, ResumeData) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        trainer.callbacks.append(ResumeData())  # type: ignore[attr-defined]  # it is made in __init__


def follow(trainer: pl.Trainer, loader: ShardedLoader) -> None:
    """Let the state of a training loader be without what Lightning has taken ahead. Safe to call twice."""
    loader.hold_back(partial(_in_hand, weakref.ref(trainer)))


def take_up(trainer: pl.Trainer) -> None:
    """At the start of training, once: see Note [What Lightning leaves out].

    Raises:
        ChangedDataError: The data are not those of the checkpoint.
        ForeignDataError: The checkpoint was saved with other loaders.
    """
    loop = trainer.fit_loop
    loaders = _streamed(loop)
    for loader in loaders:
        follow(trainer, loader)
    fetcher: Any = loop._data_fetcher
    if not loaders or not loop.is_resuming or fetcher is None:
        return
    is_elsewhere = _load_states(loop)
    if any(loader.is_new for loader in loaders) and loop.epoch_loop.batch_progress.total.ready:
        rank_zero_warn(
            "the checkpoint does not say where training was in the streamed data, since it was saved without them: "
            "its epoch begins anew"
        )
    if _taken_ahead(fetcher):  # it may be of an epoch that is over
        is_elsewhere = True
        for loader in loaders:
            loader.take_back()
    was_over = loop.epoch_loop.batch_progress.is_last_batch
    is_over = _count_anew(loop, loaders)
    if is_over and not was_over:  # for more ranks, or larger batches, nothing is left of it
        loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
    if is_over and loop.restarting and (loop.epoch_loop.restarted_on_last or not was_over):
        # No batch for this epoch: Lightning would take one of the next, and with max_steps drop the rest of that.
        fetcher.reset()
        fetcher.done = True
    elif is_elsewhere:
        iter(fetcher)


def _streamed(loop: _FitLoop) -> list[ShardedLoader]:
    """Our loaders, out of what the strategy has put around them."""
    flattened = loop._combined_loader.flattened if loop._combined_loader is not None else []
    found = [getattr(loader, "loader", loader) for loader in flattened]
    return [loader for loader in found if isinstance(loader, ShardedLoader)]


def _in_hand(trainer: weakref.ref[pl.Trainer]) -> int:
    """Batches that Lightning has taken ahead."""
    found = trainer()
    return 0 if found is None else _taken_ahead(found.fit_loop._data_fetcher)


def _taken_ahead(fetcher: Any) -> int:
    return len(getattr(fetcher, "batches", ()))


def _load_states(loop: _FitLoop) -> bool:
    """Load what Lightning has not; whether there was something."""
    states, loop._combined_loader_states_to_load = loop._combined_loader_states_to_load, []
    combined = loop._combined_loader
    assert combined is not None
    if not states:
        return False
    if loop.restarting:
        combined._load_state_dicts(states)
        return True
    # At the end of an epoch Lightning leaves other stateful loaders alone, and so do we.
    stateful = [loader for loader in combined.flattened if hasattr(loader, "state_dict")]
    for loader, state in zip(stateful, states, strict=False):
        if isinstance(getattr(loader, "loader", loader), ShardedLoader):
            loader.load_state_dict(state)
    return True


def _count_anew(loop: _FitLoop, loaders: list[ShardedLoader]) -> bool:
    """Tell Lightning how many batches of the epoch are done, and loaders if it is over; whether it is."""
    progress: Any = loop.epoch_loop.batch_progress
    leading = [loader for loader in loaders if len(loader) >= loop.max_batches]  # the epoch ends with these
    is_over = bool(progress.is_last_batch or (leading and leading[0].done >= loop.max_batches))
    if leading or is_over:
        done: Any = loop.max_batches if is_over else leading[0].done
        if done == float("inf"):
            # Lightning begins the next epoch by itself only where it knows the number of batches.
            done, progress.is_last_batch = 0, False
        moved = done - progress.current.ready
        for name in ("ready", "started", "processed", "completed"):
            setattr(progress.current, name, getattr(progress.current, name) + moved)
    if is_over:
        for loader in loaders:
            loader.skip_rest()
    return is_over
