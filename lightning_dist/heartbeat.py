"""A rank's heartbeat: training says how far it is, and ends its waits for other ranks when it is told to.

Under ``hierdist launch`` only: the agent of the host reads it, finds ranks that hang and hosts that are slow, and frees
ranks that wait for one that does not come. Beats are written by the hooks of training itself, in its thread: what beats
by itself says nothing of training.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from lightning_dist.build import RunContext
from lightning_dist.capture.patches import Patches
from lightning_dist.comm.flight_recorder import last_operation
from lightning_dist.comm.freeing import free_groups
from lightning_dist.comm.testimony import position_of
from lightning_dist.elastic.detect.last_words import leave_words
from lightning_dist.elastic.detect.phases import Phase
from lightning_dist.elastic.detect.pulse import Pulse
from lightning_dist.elastic.detect.release import ReleaseWatch
from lightning_dist.restarting import GoingOn, go_on_elsewhere


class Heartbeat(pl.Callback):
    """Tells the agent of ``hierdist launch`` how far this rank is; without an agent it does nothing.

    :class:`~lightning_dist.strategy.HierDistStrategy` adds it by itself. Add it to a Trainer with another strategy,
    such as Lightning's ``ddp``: else a rank that hangs there looks healthy. What counts as a hang is said by the
    options ``elastic.start_s``, ``hang_floor_s``, ``hang_factor``, ``save_s`` and ``validation_s``. With it, a run that
    was started again goes on from its newest checkpoint in storage there, too.
    """

    def __init__(self) -> None:
        self._pulse: Pulse | None = None
        self._release: ReleaseWatch | None = None
        self._patches = Patches()
        self._freed: str | None = None  # why, and from which operation
        self._going_on: GoingOn | None = None  # where the strategy does not see to it

    @property
    def pulse(self) -> Pulse | None:
        """What writes the beats; ``None`` without an agent, and outside of a Trainer's call."""
        return self._pulse

    def open(self) -> None:
        """Begin to beat: this rank is about to meet the others. Safe to call twice."""
        if self._pulse is None:
            self._freed = None
            self._pulse = Pulse.open()
            self._enter(Phase.JOINING)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """The ranks have met."""
        if stage == "fit" and self._going_on is None:
            self._going_on = go_on_elsewhere(trainer, os.environ)
        self.open()
        pulse = self._pulse
        if pulse is None:
            return
        run = _run_of(trainer)
        if run is not None:
            run.collectives.activity.tell(lambda begun, waits, what: pulse.mark(begun=begun, waits=waits, what=what))
            if run.collectives.blocks_host:  # else the host does not see its device wait
                pulse.know_waits(lambda: run.collectives.activity.waited_s)
        if self._release is None:
            self._release = ReleaseWatch(pulse.cell, round=pulse.round, free=functools.partial(self._free, pulse, run))
            self._patches.replace(trainer, "save_checkpoint", functools.partial(_saving, pulse))
        self._enter(Phase.LOADING)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All callbacks are set up: where their checkpoints go is left for the next start."""
        if self._going_on is not None:
            self._going_on.leave_trail()

    # -- training -----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Model, data and snapshot are there."""
        self._enter(Phase.FIRST_STEP)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Loaders may start their workers anew."""
        if self._pulse is not None and self._pulse.phase != Phase.FIRST_STEP:
            self._pulse.enter(Phase.BETWEEN)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A step begins."""
        if self._pulse is not None:
            self._pulse.step_begins(trainer.global_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A step is done."""
        if self._pulse is not None:
            self._pulse.step_ends(trainer.global_step)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What is done at the end of an epoch."""
        self._enter(Phase.BETWEEN)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The last saves."""
        self._enter(Phase.ENDING)

    # -- validating, testing, predicting ------------------------------------------------------------------------------

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Also before the first step, as a check."""
        self._enter(Phase.VALIDATION)

    on_test_start = on_predict_start = on_validation_start

    def on_validation_batch_end(self, trainer: pl.Trainer, *arguments: Any, **more: Any) -> None:
        """Progress."""
        self._enter(Phase.VALIDATION)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What is done with the results."""
        self._enter(Phase.BETWEEN)

    on_test_end = on_predict_end = on_validation_end

    # -- ending -------------------------------------------------------------------------------------------------------

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave word of what has happened; Lightning calls no teardown then."""
        self._going_on = None
        pulse = self._pulse
        if pulse is None:
            return
        if self._freed is not None and self._freed not in str(exception) and hasattr(exception, "add_note"):
            exception.add_note(self._freed)  # from Python 3.11 on
        if isinstance(exception, Exception):
            said = f"{type(exception).__name__}: {exception}"
            leave_words(pulse.folder, pulse.local_rank, said, _Doing.now(_run_of(trainer)).last_collective)
        self._enter(Phase.ENDING)
        self._close(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """What the script does now is its own affair. Safe to call twice."""
        self._going_on = None
        self._enter(Phase.DONE)
        self._close(trainer)

    def _enter(self, phase: Phase) -> None:
        if self._pulse is not None:
            self._pulse.enter(phase)

    def _close(self, trainer: pl.Trainer) -> None:
        release, self._release = self._release, None
        pulse, self._pulse = self._pulse, None
        if release is not None:
            release.close()
        self._patches.undo()
        run = _run_of(trainer)
        if run is not None:
            run.collectives.activity.tell(None)
        if pulse is not None:
            pulse.close()

    def _free(self, pulse: Pulse, run: RunContext | None, why: str) -> None:
        """In the thread that watches for the order: end every wait of this process for other ranks."""
        doing = _Doing.now(run)
        said = f"{why}; it {doing}"
        self._freed = said
        leave_words(pulse.folder, pulse.local_rank, said, doing.last_collective)
        if run is not None:
            run.collectives.activity.release(said)
        free_groups()


@dataclass(frozen=True)
class _Doing:
    """What this process does between ranks.

    Attributes:
        waits: Whether the seam knows that it waits.
        words: What the seam says, or where the thread of training is.
        recorded: What torch's flight recorder says. It knows nothing of shared memory, and everything of what went
            beside the seam.
    """

    waits: bool
    words: str
    recorded: str | None

    @classmethod
    def now(cls, run: RunContext | None) -> _Doing:
        """From any thread, also while others are blocked."""
        if run is None:
            where = position_of(threading.main_thread().ident or 0)
            return cls(False, f"is at {where}", last_operation())
        return cls(*run.collectives.activity.describe(), last_operation())

    @property
    def last_collective(self) -> str | None:
        """The operation it waits in, or was in last; ``None``: nobody knows of one."""
        return str(self) if self.waits else self.recorded

    def __str__(self) -> str:
        return self.words if self.recorded is None else f"{self.words} (flight recorder: {self.recorded})"


def pulse_of(trainer: pl.Trainer) -> Pulse | None:
    """What writes a Trainer's beats, in one of its calls; ``None`` without an agent."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # it is made in __init__
    return next((callback.pulse for callback in callbacks if isinstance(callback, Heartbeat)), None)


def attach(trainer: pl.Trainer, *, may_stay: bool = False) -> None:
    """Let a Trainer's calls beat, from before its ranks meet. Does nothing without an agent; safe to call twice.

    Args:
        trainer: Whose.
        may_stay: This process means to stay for the next round, should another rank fail.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # it is made in __init__
    found = next((callback for callback in callbacks if isinstance(callback, Heartbeat)), None)
    if found is None:
        found = Heartbeat()
        callbacks.insert(0, found)  # so that a step counts as done before what others do after it
    found.open()
    if may_stay and found.pulse is not None:
        found.pulse.offer_to_stay()


def _run_of(trainer: pl.Trainer) -> RunContext | None:
    return getattr(trainer.strategy, "run_context", None)


def _saving(pulse: Pulse, save: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(save)
    def save_checkpoint(*arguments: Any, **more: Any) -> None:
        with pulse.entered(Phase.SAVING):
            save(*arguments, **more)

    return save_checkpoint
