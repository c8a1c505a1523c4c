"""``ModelCheckpoint`` whose checkpoints are sharded folders, also under Lightning's own ddp."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any
from weakref import proxy

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_dist import build
from lightning_dist.config import (
    CHECKPOINT_PRESETS,
    CheckpointConfig,
    ParallelConfig,
    SyncConfig,
    TopologyConfig,
    resolve,
)
from lightning_dist.errors import CombinationError, HierDistError
from lightning_dist.events import EventStream
from lightning_dist.folder_io import FolderCheckpointIO
from lightning_dist.modes import Mode, Setting, checkpoints
from lightning_dist.modes.mode import unwrapped
from lightning_dist.planning.save_interval import Measured, SavePace
from lightning_dist.restarting import GoingOn, go_on_elsewhere
from lightning_dist.state_strategy import StateStrategy

_KNOWN = (
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "current_score",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
    "_last_checkpoint_saved",
)  # what ModelCheckpoint knows of the checkpoints that there are


class AsyncShardedCheckpoint(ModelCheckpoint):
    """``ModelCheckpoint`` whose checkpoints are folders, into which all ranks write while training goes on.

    Under :class:`~lightning_dist.strategy.HierDistStrategy` it says how that writes, unless the strategy was told;
    under Lightning's own ``ddp`` it writes itself, folders can be resumed from, and a run that ``hierdist launch`` or
    torchrun has started again goes on from the newest by itself. ``save_last=True`` is a link
    on disk, which moves once the checkpoint is committed. What each checkpoint took is logged as ``checkpoint/...`` on
    rank 0, in the first step after it is committed.

    Args:
        dirpath: Where to.
        checkpoint: ``"async_sharded"``, ``"sharded"``, a mapping of options or a
            :class:`~lightning_dist.config.CheckpointConfig`.
        every: ``"auto"``: as often as loses the least time, by what saves and steps take on the slowest rank.
        mtbf_h: With ``every="auto"``: mean time between failures of the whole job, in hours; that of a host over the
            number of hosts.
        restart_s: With ``every="auto"``: from a failure to work again, in seconds; part of the lost time that is
            printed.
        **arguments: Of :class:`~lightning.pytorch.callbacks.ModelCheckpoint`.

    Raises:
        CombinationError: The strategy is another one, or the checkpoint is not sharded, or ``every`` does not go with
            the other arguments.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        checkpoint: str | Mapping[str, Any] | CheckpointConfig = "async_sharded",
        every: str | None = None,
        mtbf_h: float | None = None,
        restart_s: float = 0.0,
        **arguments: Any,
    ) -> None:
        self._config = resolve("checkpoint", checkpoint, CheckpointConfig, CHECKPOINT_PRESETS)
        if not self._config.is_sharded:
            raise CombinationError(
                f"AsyncShardedCheckpoint with checkpoint.mode={self._config.mode}: write sharded or async_sharded, or "
                "use ModelCheckpoint"
            )
        where = None if dirpath is None else os.fspath(dirpath).removeprefix("file://")  # Lightning takes it for a name
        if arguments.get("save_last") is True and "://" not in (where or ""):
            arguments["save_last"] = "link"
        self._pace = _pace(every, mtbf_h, restart_s, arguments)
        if self._pace is not None:
            arguments["every_n_train_steps"] = 1  # asked after each step, and then the pace is
        super().__init__(where, **arguments)
        self._run: build.RunContext | None = None
        self._saver: build.CheckpointSaver | None = None
        self._mode: Mode | None = None
        self._logged: build.Saved | None = None
        self._going_on: GoingOn | None = None  # where the strategy does not see to it

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Get ready to write, and to go on; every rank."""
        if stage == "fit" and self._going_on is None:
            self._going_on = go_on_elsewhere(trainer, os.environ)
        super().setup(trainer, pl_module, stage)
        strategy = trainer.strategy
        if isinstance(strategy, StateStrategy):
            if not strategy.checkpoint_config.is_sharded:
                strategy.checkpoint_config = self._config
            return
        if not isinstance(strategy, DDPStrategy):
            raise CombinationError(
                f"AsyncShardedCheckpoint with {type(strategy).__name__}: write strategy='ddp', or 'hierdist' and its "
                "kin, e.g. 'hierdist_zero2'"
            )
        if self._config.replica != "off":
            raise CombinationError(
                f"checkpoint.replica={self._config.replica} with {type(strategy).__name__}, which does not resume from "
                "memory: write strategy='hierdist', or replica=off"
            )
        if not isinstance(strategy.checkpoint_io, FolderCheckpointIO):
            strategy.checkpoint_io = FolderCheckpointIO(strategy.checkpoint_io)
        if stage == "fit":
            self._open(trainer, pl_module)

    @property
    def every(self) -> str | None:
        """``"auto"``, or ``None``: as often as :class:`~lightning.pytorch.callbacks.ModelCheckpoint` is told."""
        return None if self._pace is None else "auto"

    @property
    def checkpoint_config(self) -> CheckpointConfig:
        """How it writes where the strategy does not."""
        return self._config

    @property
    def events(self) -> EventStream | None:
        """What is measured of its own saves; ``None`` where the strategy saves, and outside of a fit."""
        return None if self._run is None else self._run.events

    def _open(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        sync = SyncConfig()
        events = EventStream(rank=trainer.global_rank)
        run = self._run = build.open_run(TopologyConfig(), sync, events=events, device=trainer.strategy.root_device)
        agreement = build.open_agreement(run) if trainer.world_size > 1 else None
        setting = Setting(run, ParallelConfig(), sync, {}, trainer.precision_plugin, agreement, rank_zero_info)
        self._mode = Mode(setting, pl_module)
        checkpoints.refuse(trainer, self._mode, self._config)
        self._saver = build.open_checkpoint_saver(run, self._config, agreement)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All callbacks are set up: where their checkpoints go is left for the next start."""
        if self._going_on is not None:
            self._going_on.leave_trail()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to measure."""
        super().on_train_start(trainer, pl_module)
        if self._pace is not None:
            self._pace.begin(trainer.global_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is time to, and log what the checkpoint before took, once it is committed."""
        if self._pace is not None:
            self._pace.step_ended(trainer.global_step)
        # Where training goes on at a step that is due, Lightning would save again, in the middle of the next one.
        is_in_step = trainer.fit_loop.epoch_loop._should_accumulate()
        if not is_in_step and (self._pace is None or self._pace.is_due(trainer.global_step)):
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._log_saved(trainer)
        self._keep_pace(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let what is being copied be copied: callbacks may swap other weights in."""
        super().on_validation_start(trainer, pl_module)
        if self._saver is not None:
            self._saver.settle()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for the last one."""
        super().on_train_end(trainer, pl_module)
        saver = self._saver_of(trainer)
        if saver is not None:
            saver.finish()
        self._log_saved(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Save if asked to, and let the other ranks know, who may wait for a checkpoint."""
        if self._saver is not None:
            self._saver.settle()
        try:
            super().on_exception(trainer, pl_module, exception)
        except HierDistError as error:  # the exception is what is to be raised
            rank_zero_warn(f"no checkpoint was written on {type(exception).__name__}: {error}")
        if self._run is not None:
            self._run.leave_word(exception)
        self._close()  # Lightning calls no teardown of callbacks after an exception

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Release what was opened. Safe to call twice."""
        super().teardown(trainer, pl_module, stage)
        self._close()

    def _close(self) -> None:
        opened = (self._saver, self._mode.setting.agreement if self._mode is not None else None, self._run)
        self._saver = self._mode = self._run = self._going_on = None
        for part in opened:
            if part is not None:
                part.close()

    def _saver_of(self, trainer: pl.Trainer) -> build.CheckpointSaver | None:
        return trainer.strategy._saver if isinstance(trainer.strategy, StateStrategy) else self._saver

    def _log_saved(self, trainer: pl.Trainer) -> None:
        if self._saver is not None:  # the strategy's own are logged by it
            self._logged = checkpoints.log_saved(trainer, self._saver, self._logged)

    def _keep_pace(self, trainer: pl.Trainer) -> None:
        """After a step that may have saved: measure, and choose the interval alike on all ranks."""
        pace, saver, step = self._pace, self._saver_of(trainer), trainer.global_step
        if pace is None or saver is None or saver.last_started is None:
            return
        if not pace.is_due(step) or self._last_global_step_saved != step:
            return
        started, saved = saver.last_started, saver.last_saved
        measured = pace.saved(
            step,
            hold_s=started.stall_s + started.late_s,
            wait_s=started.wait_s,
            write_s=0.0 if saved is None else saved.background_s,
            is_skipped=started.is_skipped,
        )
        if measured is None:
            return
        chosen = pace.settle(Measured(*saver.slowest(measured)))
        if chosen is not None:
            rank_zero_info(f"hierdist: {chosen}")

    def _find_last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        """For ``ckpt_path="last"``: those that are committed, and of other kinds, but no folder where a save has just
        begun. Of URLs Lightning 2.6 loses the protocol and then finds nothing, and takes the age of a file only: there
        it is given the marker.
        """
        found = super()._find_last_checkpoints(trainer)
        is_local = "file" in self._fs.protocol
        paths = {path if is_local else str(self._fs.unstrip_protocol(path)) for path in found}
        markers = {path: checkpoints.marker_of(path) for path in paths if checkpoints.is_sharded(path)}
        folders = {path if is_local else marker for path, marker in markers.items() if marker is not None}
        others = {
            path for path in paths - set(markers) if not (self._fs.isdir(path) and checkpoints.is_unwritten(path))
        }
        return folders | others

    def _save_topk_checkpoint(self, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        with self._forgetting_skipped(trainer):
            super()._save_topk_checkpoint(trainer, monitor_candidates)

    def _save_last_checkpoint(self, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        with self._forgetting_skipped(trainer):
            super()._save_last_checkpoint(trainer, monitor_candidates)

    @contextlib.contextmanager
    def _forgetting_skipped(self, trainer: pl.Trainer) -> Iterator[None]:
        """Inside, a checkpoint that is skipped takes no other's place: neither among the best, nor as the last."""
        known = {name: copy(value) for name, value in vars(self).items() if name in _KNOWN}
        saver = self._saver_of(trainer)
        before = None if saver is None else saver.last_started
        yield
        if saver is not None and saver.last_started is not before and saver.has_skipped:
            vars(self).update(known)

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        if self._saver is None or self._mode is None:
            super()._save_checkpoint(trainer, filepath)
            return
        checkpoints.save(
            self._saver,
            trainer._checkpoint_connector.dump_checkpoint(self.save_weights_only),
            filepath,
            mode=self._mode,
            optimizers=[unwrapped(each) for each in trainer.optimizers],
        )
        self._saver.let_begin()
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))

    def _remove_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        if self._saver is None:
            super()._remove_checkpoint(trainer, filepath)
        elif trainer.is_global_zero and not self._saver.has_skipped:
            self._saver.once_committed(functools.partial(checkpoints.remove, filepath))

    def _link_checkpoint(self, trainer: pl.Trainer, filepath: str, linkpath: str) -> None:  # type: ignore[override]  # it is static there, and called on the instance
        saver = self._saver_of(trainer)
        if not trainer.is_global_zero or os.path.abspath(filepath) == os.path.abspath(linkpath):
            return
        if saver is not None and saver.has_skipped:
            return
        move = functools.partial(_link, filepath, linkpath)
        move() if saver is None else saver.once_committed(move, first=True)


def _pace(every: str | None, mtbf_h: float | None, restart_s: float, arguments: Mapping[str, Any]) -> SavePace | None:
    if every not in (None, "auto"):
        raise CombinationError(f"every={every!r}: write every='auto', or every_n_train_steps=... for a number of steps")
    if every is None:
        if mtbf_h is not None or restart_s:
            raise CombinationError("mtbf_h and restart_s are for every='auto': add it, or leave them out")
        return None
    if mtbf_h is None or not 0 < mtbf_h < math.inf or not restart_s >= 0:
        raise CombinationError(
            f"every='auto' with mtbf_h={mtbf_h} and restart_s={restart_s:g}: write the mean time between failures of "
            "the whole job in hours, e.g. mtbf_h=200, and restart_s of at least 0"
        )
    others = ("every_n_train_steps", "every_n_epochs", "train_time_interval", "monitor")
    given = [name for name in others if arguments.get(name) is not None]
    if given:
        raise CombinationError(
            f"every='auto' with {' and '.join(given)}: it says when to save, and keeps the newest; leave the other "
            "out, or add a second callback with it"
        )
    return SavePace(mtbf_h * 3600, restart_s=restart_s)


def _link(target: str, link: str) -> None:
    """At once: whoever looks sees the old one or the new one."""
    if os.path.isdir(link) and not os.path.islink(link):
        checkpoints.remove(link)
    fresh = f"{link}.new"
    if os.path.lexists(fresh):
        os.remove(fresh)
    os.symlink(os.path.relpath(target, os.path.dirname(link)), fresh)
    os.replace(fresh, link)
