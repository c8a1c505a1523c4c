"""What a scheduler's signals on any rank make all ranks do, at the same step: stop, or save and be queued again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_dist.comm.agreement import DelayedVote

_STOP, _REQUEUE, _WRITING = 1, 2, 4


class StopTogether:
    """Takes a Trainer's handling of SIGTERM, and of SLURM's signal before the end of a job, over for one fit.

    On SIGTERM, Lightning 2.6 asks rank 0 in a blocking broadcast before each batch, does not hear the other ranks, and
    broadcasts once more from inside its signal handler. On SLURM's signal it saves from inside the handler, in the
    middle of whatever that rank does, while others do something else. Here handlers only take note, and a vote whose
    result is read one step later, so that nobody waits for it, tells everybody. Lightning registers the handlers after
    this, beside the user's, and removes them at the end.

    Args:
        vote: Every rank makes it.
        where: Names a rank and its host.
        saving_at_once: Inside, a checkpoint is whole when saving returns.
        is_writing: Whether this rank is writing a checkpoint.

    Attributes:
        is_anyone_writing: Whether a rank was, before the batch before; alike on all ranks.
    """

    def __init__(
        self,
        vote: DelayedVote,
        where: Callable[[int], str],
        *,
        saving_at_once: Callable[[], AbstractContextManager[None]],
        is_writing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._vote = vote
        self._is_writing = is_writing
        self.is_anyone_writing = False
        self._where = where
        self._saving_at_once = saving_at_once
        self._heard: set[int] = set()  # ranks whose signal the newest requeueing has answered

    def attach(self, trainer: pl.Trainer) -> None:
        """Put this in the place of Lightning's own."""

        def note_stop(signum: object, frame: object) -> None:
            self._vote.wish(_STOP)

        def note_requeue(signum: object, frame: object) -> None:
            self._vote.wish(_REQUEUE, once=True)

        def ask() -> None:
            if self._is_writing():
                self._vote.wish(_WRITING, once=True)
            said = self._vote.cast()
            self.is_anyone_writing = any(wishes & _WRITING for wishes in said)
            self._requeue(trainer, {rank for rank, wishes in enumerate(said) if wishes & _REQUEUE})
            stopping = [rank for rank, wishes in enumerate(said) if wishes & _STOP]
            if stopping:
                trainer._signal_connector.received_sigterm = True
                self._stop(stopping)

        trainer._signal_connector._slurm_sigusr_handler_fn = note_requeue  # type: ignore[method-assign, assignment]
        loop = trainer.fit_loop.epoch_loop
        if trainer.world_size > 1:
            trainer._signal_connector._sigterm_notifier_fn = note_stop  # type: ignore[method-assign, assignment]
            loop._broadcast_sigterm_tensor = ask  # type: ignore[method-assign]
            return

        def advance(data_fetcher: Any) -> None:  # where several ranks ask, too
            ask()
            type(loop).advance(loop, data_fetcher)

        loop.advance = advance  # type: ignore[method-assign]  # one rank stops at once on SIGTERM, as Lightning has it

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

    def _stop(self, ranks: list[int]) -> NoReturn:
        stopped = SIGTERMException(f"SIGTERM received by {', '.join(map(self._where, ranks))}")
        stopped.code = None  # a message would otherwise turn the exit status, 0 under Lightning's ddp, into 1
        raise stopped

    def close(self) -> None:
        """Release the vote's group. Safe to call twice."""
        self._vote.close()


def detach(trainer: pl.Trainer) -> None:
    """Give the handlers back to Lightning, for what follows a fit."""
    for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
        vars(trainer._signal_connector).pop(name, None)
    for name in ("_broadcast_sigterm_tensor", "advance"):
        vars(trainer.fit_loop.epoch_loop).pop(name, None)
