"""What ``hierdist doctor`` does inside a training script that knows nothing of it.

Lightning calls :func:`attend` whenever the script makes a Trainer (see ``hierdist_doctor_hook.py``). From then on

- ``Trainer.fit`` adds :class:`StepTimeline` and :class:`ClusterMonitor`, unless the script has its own, and for this
  package's strategy :class:`PipelinePicture`. It ends the script after the first fit that trained: what comes after
  (tests, exports, a further fit) would write over files with the weights of a training that was cut short.
- Whatever the Trainer writes goes into a folder of the examination, which is removed at the end: checkpoints, also
  those that the script saves by hand, ``default_root_dir``, the profiler's files, and what the loggers of TensorBoard
  and CSV write. Other loggers, which report to a server, are left out.
- Training ends after so many optimizer steps, or minutes, without a last validation.

Note [wrapped methods]
    Callbacks cannot do this: loggers are opened before any callback is asked, and no hook comes after ``fit``. So the
    class's ``fit`` and ``save_checkpoint`` are replaced, in processes of a doctor only, and stay so until they end.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_dist.callbacks.attendance import meet
from lightning_dist.callbacks.cluster_monitor import ClusterMonitor
from lightning_dist.callbacks.monitor_outputs import MonitorOutputs
from lightning_dist.callbacks.pipeline_picture import PipelinePicture
from lightning_dist.callbacks.step_timeline import StepTimeline
from lightning_dist.capture import TrainerCapture, capture_of, default_store
from lightning_dist.monitor.doctor_notes import DoctorNote, leave, notes_of
from lightning_dist.monitor.doctor_order import DoctorOrder
from lightning_dist.strategy import HierDistStrategy

_ASKS_EVERY_S = 2.0  # rank 0 tells the others, no more often, whether the time is over
_WRAPPED = "_hierdist_doctor"
_FILE_LOGGERS = ("TensorBoardLogger", "CSVLogger")


def attend(order: str, package: str) -> None:
    """Make the Trainers of a package patients.

    Args:
        order: A :class:`~lightning_dist.monitor.doctor_order.DoctorOrder`, as text.
        package: ``lightning.pytorch`` or ``pytorch_lightning``, which has been imported.
    """
    trainer_class = sys.modules[package].Trainer
    if not hasattr(trainer_class, _WRAPPED):
        given = DoctorOrder.from_text(order)
        setattr(trainer_class, _WRAPPED, given)
        trainer_class.fit = _ending_fit(trainer_class.fit, given, package)
        trainer_class.save_checkpoint = _saving_aside(trainer_class.save_checkpoint, given)


class DoctorStop(pl.Callback):
    """Ends training after some steps or minutes, on all ranks at the same step, and notes who has trained.

    Args:
        order: When; on all hosts it is rank 0's that counts.
        clock_s: A monotonic clock.
    """

    def __init__(self, order: DoctorOrder, *, clock_s: Any = time.monotonic) -> None:
        self._own = order
        self.order = order  # rank 0's, from set-up on
        self._clock_s = clock_s
        self._capture: TrainerCapture | None = None
        self._folder: Path | None = None
        self._started_s = 0.0
        self._global_step = 0
        self._batches = 0
        self._asks_at = 1  # batches
        self.steps = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Say, before the others do, where the run's files go; collective."""
        if stage != "fit":
            return
        store = default_store()
        if store is not None:
            meet(store, trainer.global_rank, trainer.world_size)
        self.order = DoctorOrder.from_text(trainer.strategy.broadcast(self._own.to_text()))
        self._capture = capture_of(trainer, self)
        self._folder = self._capture.folder(self.order.record)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Time runs from now on."""
        if self._folder is not None:
            note = DoctorNote(trainer.global_rank, trainer.world_size, str(self._folder), str(self.order.scratch))
            with contextlib.suppress(OSError):  # then the doctor says that it has heard of no step
                leave(self._own, note)
        self.steps, self._batches, self._asks_at = 0, 0, 1
        self._global_step, self._started_s = trainer.global_step, self._clock_s()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Every rank counts the same steps and batches, and hears of the time at the same one.

        Time is looked at between steps too: a script that steps an optimizer of its own has none that Lightning counts.
        """
        self._batches += 1
        if trainer.global_step != self._global_step:  # else gradients are accumulated
            self._global_step = trainer.global_step
            self.steps += 1
        if self.steps >= self.order.steps or self._is_late(trainer):
            self._end(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Let the capture go."""
        self._release()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let the capture go."""
        self._release()

    def _is_late(self, trainer: pl.Trainer) -> bool:
        """Rank 0's clock decides, and says after how many batches to ask again: those of about two seconds."""
        if self._batches < self._asks_at:
            return False
        passed_s = self._clock_s() - self._started_s
        batches_per_s = self._batches / max(passed_s, 1e-3)
        more = 0 if passed_s >= self.order.minutes * 60 else max(1, round(_ASKS_EVERY_S * batches_per_s))
        more = trainer.strategy.broadcast(more)
        self._asks_at = self._batches + more
        return more == 0

    def _end(self, trainer: pl.Trainer) -> None:
        trainer.should_stop = True
        trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None  # they would keep it going
        trainer.limit_val_batches = 0  # a Trainer that stops validates once more
        for each in (*trainer.callbacks, *trainer.lr_scheduler_configs):  # type: ignore[attr-defined]  # an attribute of every Trainer
            if hasattr(each, "monitor") and hasattr(each, "strict"):
                each.strict = False  # what EarlyStopping and ReduceLROnPlateau look at may come from validation

    def _release(self) -> None:
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.release(self)


def divert(trainer: Any, order: DoctorOrder, package: str) -> None:
    """Make a Trainer that is about to fit measure itself, and write nowhere but into the examination's folder."""
    scratch = order.scratch
    trainer._default_root_dir = str(scratch)
    callbacks = [each for each in trainer.callbacks if not isinstance(each, MonitorOutputs | DoctorStop)]
    for number, callback in enumerate(callbacks):
        if hasattr(callback, "dirpath"):  # of ModelCheckpoint and its kin
            with contextlib.suppress(AttributeError):  # some only say where they write
                callback.dirpath = str(scratch / f"checkpoints-{number}")
    if getattr(trainer.profiler, "dirpath", None) is not None:
        trainer.profiler.dirpath = str(scratch)
    trainer.loggers = _diverted_loggers(trainer.loggers, scratch, package)
    ours: list[pl.Callback] = [StepTimeline(), ClusterMonitor()]
    if isinstance(trainer.strategy, HierDistStrategy):
        ours.append(PipelinePicture())  # which draws a pipeline, if there is one
    missing = [each for each in ours if not any(isinstance(there, type(each)) for there in callbacks)]
    trainer.callbacks = [DoctorStop(order), *missing, *callbacks]
    for callback in trainer.callbacks:
        if isinstance(callback, StepTimeline):
            callback.is_read = True
        if isinstance(callback, PipelinePicture):
            callback.folder = order.folder  # beside the report, which shows it


def _diverted_loggers(loggers: list[Any], scratch: Path, package: str) -> list[Any]:
    there = sys.modules[f"{package}.loggers"]
    kept, left_out = [], []
    for number, logger in enumerate(loggers):
        name = type(logger).__name__
        if name in _FILE_LOGGERS and type(logger) is getattr(there, name, None):
            kept.append(type(logger)(str(scratch), name=f"logs-{number}", version=""))
        else:
            left_out.append(name)
    if left_out:
        rank_zero_info(f"hierdist doctor: nothing is logged to {', '.join(left_out)}")
        if not kept:
            kept.append(sys.modules[f"{package}.loggers.logger"].DummyLogger())  # for scripts that use it themselves
    return kept


def _ending_fit(fit: Any, order: DoctorOrder, package: str) -> Any:
    @functools.wraps(fit)
    def ending(self: Any, *args: Any, **kwargs: Any) -> None:
        divert(self, order, package)
        fit(self, *args, **kwargs)
        if any(note.has_steps for note in notes_of(order)):
            rank_zero_info("hierdist doctor: that is enough; the script ends here")
            sys.exit(0)

    return ending


def _order_of(trainer: Any, own: DoctorOrder) -> DoctorOrder:
    """Rank 0's, once it is known: ranks of several hosts may write one checkpoint together."""
    return next((each.order for each in trainer.callbacks if isinstance(each, DoctorStop)), own)


def _saving_aside(save_checkpoint: Any, order: DoctorOrder) -> Any:
    @functools.wraps(save_checkpoint)
    def saving(self: Any, filepath: str | Path, *args: Any, **kwargs: Any) -> Any:
        path, scratch = Path(filepath), _order_of(self, order).scratch
        if scratch not in path.parents:
            path = scratch / "saved" / path.name
        return save_checkpoint(self, path, *args, **kwargs)

    return saving
