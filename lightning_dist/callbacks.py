"""The callbacks a user adds; thin."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import proxy

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_dist import build
from lightning_dist.config import (
    CHECKPOINT_PRESETS,
    CheckpointConfig,
    ParallelConfig,
    SyncConfig,
    TopologyConfig,
    resolve,
)
from lightning_dist.errors import CombinationError
from lightning_dist.events import EventStream
from lightning_dist.folder_io import FolderCheckpointIO
from lightning_dist.modes import Mode, Setting, checkpoints
from lightning_dist.modes.mode import unwrapped
from lightning_dist.parallel.pipeline.picture import draw
from lightning_dist.state_strategy import StateStrategy
from lightning_dist.strategy import HierDistStrategy


class PipelinePicture(pl.Callback):
    """Writes how a pipeline has worked when training ends: ``pipeline.html``, a picture, and ``pipeline.json``.

    Args:
        folder: Where to; the Trainer's ``default_root_dir`` if not given.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Every rank takes part; rank 0 writes."""
        strategy = trainer.strategy
        if not isinstance(strategy, HierDistStrategy):
            rank_zero_warn("PipelinePicture has no effect without lightning_dist's strategy and parallel=pipeline")
            return
        report = strategy.pipeline_report()
        if report is None or not trainer.is_global_zero:
            return
        folder = Path(self._folder or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pipeline.html").write_text(draw(report), encoding="utf-8")
        (folder / "pipeline.json").write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
        rank_zero_info(f"hierdist: a picture of the pipeline is in {folder / 'pipeline.html'}")


class AsyncShardedCheckpoint(ModelCheckpoint):
    """``ModelCheckpoint`` whose checkpoints are folders, into which all ranks write while training goes on.

    Under :class:`~lightning_dist.strategy.HierDistStrategy` it says how that writes, unless the strategy was told;
    under Lightning's own ``ddp`` it writes itself, and folders can be resumed from. ``save_last=True`` is a link
    on disk, which moves once the checkpoint is committed.

    Args:
        dirpath: Where to.
        checkpoint: ``"async_sharded"``, ``"sharded"``, a mapping of options or a
            :class:`~lightning_dist.config.CheckpointConfig`.
        **arguments: Of :class:`~lightning.pytorch.callbacks.ModelCheckpoint`.

    Raises:
        CombinationError: The strategy is another one, or the checkpoint is not sharded.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        checkpoint: str | Mapping[str, Any] | CheckpointConfig = "async_sharded",
        **arguments: Any,
    ) -> None:
        self._config = resolve("checkpoint", checkpoint, CheckpointConfig, CHECKPOINT_PRESETS)
        if not self._config.is_sharded:
            raise CombinationError(
                f"AsyncShardedCheckpoint with checkpoint.mode={self._config.mode}: write sharded or async_sharded, or "
                "use ModelCheckpoint"
            )
        if arguments.get("save_last") is True and "://" not in os.fspath(dirpath or ""):
            arguments["save_last"] = "link"
        super().__init__(None if dirpath is None else os.fspath(dirpath), **arguments)
        self._run: build.RunContext | None = None
        self._saver: build.CheckpointSaver | None = None
        self._mode: Mode | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Get ready to write; every rank."""
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

    def _open(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        sync = SyncConfig()
        events = EventStream(rank=trainer.global_rank)
        run = self._run = build.open_run(TopologyConfig(), sync, events=events, device=trainer.strategy.root_device)
        agreement = build.open_agreement(run) if trainer.world_size > 1 else None
        setting = Setting(run, ParallelConfig(), sync, {}, trainer.precision_plugin, agreement, rank_zero_info)
        self._mode = Mode(setting, pl_module)
        self._saver = build.open_checkpoint_saver(run, self._config, agreement)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for the last one."""
        super().on_train_end(trainer, pl_module)
        if self._saver is not None:
            self._saver.finish()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Let the other ranks know, who may wait for a checkpoint."""
        super().on_exception(trainer, pl_module, exception)
        if self._run is not None:
            self._run.leave_word(exception)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Release what was opened. Safe to call twice."""
        super().teardown(trainer, pl_module, stage)
        opened = (self._saver, self._mode.setting.agreement if self._mode is not None else None, self._run)
        self._saver = self._mode = self._run = None
        for part in opened:
            if part is not None:
                part.close()

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
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))

    def _remove_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        if self._saver is None:
            super()._remove_checkpoint(trainer, filepath)
        elif trainer.is_global_zero:
            self._saver.once_committed(functools.partial(checkpoints.remove, filepath))

    def _link_checkpoint(self, trainer: pl.Trainer, filepath: str, linkpath: str) -> None:  # type: ignore[override]  # it is static there, and called on the instance
        saver = trainer.strategy._saver if isinstance(trainer.strategy, StateStrategy) else self._saver
        if not trainer.is_global_zero or os.path.abspath(filepath) == os.path.abspath(linkpath):
            return
        move = functools.partial(_link, filepath, linkpath)
        move() if saver is None else saver.once_committed(move, first=True)


def _link(target: str, link: str) -> None:
    """At once: whoever looks sees the old one or the new one."""
    if os.path.isdir(link) and not os.path.islink(link):
        checkpoints.remove(link)
    fresh = f"{link}.new"
    if os.path.lexists(fresh):
        os.remove(fresh)
    os.symlink(os.path.relpath(target, os.path.dirname(link)), fresh)
    os.replace(fresh, link)
