"""A SIGTERM on any rank stops all ranks at the same step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_dist.comm.agreement import DelayedVote


class StopTogether:
    """Takes a Trainer's handling of SIGTERM over for one fit.

    Lightning 2.6 asks rank 0 in a blocking broadcast before each batch, does not hear the other ranks, and broadcasts
    once more from inside its signal handler. Here the handler only takes note, and a vote whose result is read one step
    later, so that nobody waits for it, tells everybody. Lightning registers the handler after this, beside the user's
    and SLURM's, and removes it at the end.

    Args:
        vote: Every rank makes it.
        where: Names a rank and its host.
    """

    def __init__(self, vote: DelayedVote, where: Callable[[int], str]) -> None:
        self._vote = vote
        self._where = where

    def attach(self, trainer: pl.Trainer) -> None:
        """Put this in the place of Lightning's own."""

        def note(signum: object, frame: object) -> None:
            self._vote.wish()

        def ask() -> None:
            ranks = self._vote.cast()
            if ranks:
                trainer._signal_connector.received_sigterm = True
                self._stop(ranks)

        trainer._signal_connector._sigterm_notifier_fn = note  # type: ignore[method-assign, assignment]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = ask  # type: ignore[method-assign]

    def _stop(self, ranks: list[int]) -> NoReturn:
        stopped = SIGTERMException(f"SIGTERM received by {', '.join(map(self._where, ranks))}")
        stopped.code = None  # a message would otherwise turn the exit status, 0 under Lightning's ddp, into 1
        raise stopped

    def close(self) -> None:
        """Release the vote's group. Safe to call twice."""
        self._vote.close()


def detach(trainer: pl.Trainer) -> None:
    """Give the handler back to Lightning, for what follows a fit."""
    vars(trainer._signal_connector).pop("_sigterm_notifier_fn", None)
