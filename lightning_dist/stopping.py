"""What signals on any rank, or an agent's order, make all ranks do at one step: save, and stop or be queued again."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_dist.comm.agreement import DelayedVote
from lightning_dist.elastic.detect.phases import Order
from lightning_dist.errors import CheckpointError, CollectiveTimeoutError
from lightning_dist.topology.spec import Cluster

_STOP, _REQUEUE, _WRITING, _LEAVE, _DEPART = 1, 2, 4, 8, 16
_SAME_SIGNAL_S = 1.0
"""A scheduler signals the group, and launchers pass it on: what comes so soon after the first is no second one."""


def _nothing(step: int) -> None:
    pass


@dataclass(frozen=True)
class Asked:
    """Who wants all ranks to stop; alike on all of them.

    Attributes:
        signalled: Ranks that got a signal.
        ordered: Ranks whose agent asks for it.
        departing: Those of them whose host leaves the run.
    """

    signalled: tuple[int, ...] = ()
    ordered: tuple[int, ...] = ()
    departing: tuple[int, ...] = ()


def memory_outlives(asked: Asked, replica: str, cluster: Cluster) -> bool:
    """Whether what memory has is still there once ranks have stopped and hosts have left; else storage is needed.

    A signal to a rank may be for all hosts. Where one host leaves, another one has its part if it has a buddy.
    """
    if asked.signalled or replica == "off":
        return False
    num_departing = len({cluster.host_of(rank) for rank in asked.departing})
    if replica == "buddy":
        return num_departing < min(2, cluster.num_hosts)
    return num_departing == 0 and cluster.num_hosts == 1


@dataclass(frozen=True)
class Leaving:
    """How a rank saves before it stops, and what it has to do with an agent; the defaults: not at all.

    Attributes:
        save: Every rank calls it, between two optimizer steps; who asked for it decides where to.
            ``None``: ranks stop without.
        order: What the agent of this host wants of this rank; asked before each batch.
        answer: Tell the agent after which step that is done.
        is_writing: Whether this rank is writing a checkpoint.
        signals: Beside SIGTERM, what else asks to stop.
    """

    save: Callable[[Asked], None] | None = None
    order: Callable[[], Order] = lambda: Order.NONE
    answer: Callable[[int], None] = _nothing
    is_writing: Callable[[], bool] = lambda: False
    signals: Sequence[signal.Signals] = ()


class StopTogether:
    """Takes a Trainer's handling of SIGTERM, and of SLURM's signal before the end of a job, over for one fit.

    On SIGTERM, Lightning 2.6 asks rank 0 in a blocking broadcast before each batch, does not hear the other ranks, and
    broadcasts once more from inside its signal handler. On SLURM's signal it saves from inside the handler, in the
    middle of whatever that rank does, while others do something else. Here handlers only take note, and a vote whose
    result is read one step later, so that nobody waits for it, tells everybody. Lightning registers the handlers after
    this, beside the user's, and removes them at the end. A second SIGTERM ends the process at once.

    Args:
        vote: Every rank makes it.
        where: Names a rank and its host.
        saving_at_once: Inside, a checkpoint is whole when saving returns.
        leaving: How a rank saves before it stops.

    Attributes:
        is_anyone_writing: Whether a rank was writing a checkpoint before the batch before; alike on all ranks.
    """

    def __init__(
        self,
        vote: DelayedVote,
        where: Callable[[int], str],
        *,
        saving_at_once: Callable[[], AbstractContextManager[None]],
        leaving: Leaving | None = None,
    ) -> None:
        self._vote = vote
        self._where = where
        self._saving_at_once = saving_at_once
        self._leaving = leaving or Leaving()
        self._heard: set[int] = set()  # ranks whose signal the newest requeueing has answered
        self._noted_s: float | None = None
        self._replaced: dict[signal.Signals, Any] = {}
        self.is_anyone_writing = False

    def attach(self, trainer: pl.Trainer) -> None:
        """Put this in the place of Lightning's own."""

        def note_requeue(signum: object, frame: object) -> None:
            self._vote.wish(_REQUEUE, once=True)

        def ask() -> None:
            self._ask(trainer)

        trainer._signal_connector._slurm_sigusr_handler_fn = note_requeue  # type: ignore[method-assign, assignment]
        loop = trainer.fit_loop.epoch_loop
        if trainer.world_size > 1 or self._leaving.save is not None:  # else one rank stops at once, as Lightning has it
            trainer._signal_connector._sigterm_notifier_fn = self._note_stop  # type: ignore[method-assign, assignment]
        if trainer.world_size > 1:
            loop._broadcast_sigterm_tensor = ask  # type: ignore[method-assign]
            return

        def advance(data_fetcher: Any) -> None:  # where several ranks ask, too
            ask()
            type(loop).advance(loop, data_fetcher)

        loop.advance = advance  # type: ignore[method-assign]

    def begin(self) -> None:
        """Once Lightning's handlers are there: heed the other signals, too."""
        if threading.current_thread() is threading.main_thread():
            for each in self._leaving.signals:
                self._replaced[each] = signal.signal(each, self._note_stop)

    def _note_stop(self, signum: int, frame: object) -> None:
        now_s = time.monotonic()
        if self._noted_s is not None and now_s - self._noted_s > _SAME_SIGNAL_S:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        self._noted_s = self._noted_s or now_s
        self._vote.wish(_STOP)

    def _ask(self, trainer: pl.Trainer) -> None:
        """Before each batch."""
        if self._leaving.is_writing():
            self._vote.wish(_WRITING, once=True)
        self._pass_on(self._leaving.order())
        said = self._vote.cast()
        self.is_anyone_writing = any(wishes & _WRITING for wishes in said)
        self._requeue(trainer, {rank for rank, wishes in enumerate(said) if wishes & _REQUEUE})
        signalled, ordered, departing = (
            tuple(rank for rank, wishes in enumerate(said) if wishes & wish) for wish in (_STOP, _LEAVE, _DEPART)
        )
        if signalled or ordered:
            self._save_and_stop(trainer, Asked(signalled, ordered, departing))

    def _pass_on(self, order: Order) -> None:
        if order in (Order.SNAPSHOT_AND_STOP, Order.SNAPSHOT_AND_DEPART):
            self._vote.wish(_LEAVE, once=True)
        if order is Order.SNAPSHOT_AND_DEPART:
            self._vote.wish(_DEPART, once=True)

    def _requeue(self, trainer: pl.Trainer, ranks: set[int]) -> None:
        """Save, and have SLURM queue the job again; once, though ranks hear of it one after another."""
        is_new = bool(ranks) and (not self._heard or bool(ranks & self._heard))
        self._heard = ranks if is_new else self._heard | ranks
        if not is_new:
            return
        connector = trainer._signal_connector
        environment = getattr(trainer.strategy, "cluster_environment", None)
        number = getattr(environment, "requeue_signal", None) or signal.SIGUSR1
        with self._saving_at_once():
            type(connector)._slurm_sigusr_handler_fn(connector, number, None)  # type: ignore[arg-type]  # it looks at neither

    def _save_and_stop(self, trainer: pl.Trainer, asked: Asked) -> None:
        save = self._leaving.save
        if save is not None and trainer.fit_loop.epoch_loop._should_accumulate():
            return  # gradients that are being accumulated would be lost: asked again before the next batch
        if save is not None:
            try:
                save(asked)
            except (CheckpointError, CollectiveTimeoutError) as error:  # the same on all ranks
                warnings.warn(f"nothing was saved before stopping: {error}", stacklevel=2)
        self._leaving.answer(trainer.global_step)
        trainer._signal_connector.received_sigterm = True
        if asked.signalled:
            self._stop(f"SIGTERM received by {', '.join(map(self._where, asked.signalled))}")
        ordered = ", ".join(map(self._where, asked.ordered))
        self._stop(f"{ordered} asked to stop after step {trainer.global_step} by an agent")

    def _stop(self, why: str) -> NoReturn:
        stopped = SIGTERMException(why)
        stopped.code = None  # a message would otherwise turn the exit status, 0 under Lightning's ddp, into 1
        raise stopped

    def close(self) -> None:
        """Release the vote's group, and give signals back that Lightning does not know of. Safe to call twice."""
        self._vote.close()
        replaced, self._replaced = self._replaced, {}
        for each, handler in replaced.items():
            signal.signal(each, handler)


def detach(trainer: pl.Trainer) -> None:
    """Give the handlers back to Lightning, for what follows a fit."""
    for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
        vars(trainer._signal_connector).pop(name, None)
    for name in ("_broadcast_sigterm_tensor", "advance"):
        vars(trainer.fit_loop.epoch_loop).pop(name, None)
