"""SIGTERM on one rank stops all ranks at the same step, and the process is as it was."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.distributed.compared import strategies
from tests.distributed.lightning_runs import OddModule, loader_of, make_batches, sgd, strategy_of, trainer_on_pool
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

BATCHES = 8


class Interrupted(OddModule):
    """Is sent SIGTERM on one rank, in one phase.

    Args:
        rank: The rank.
        where: ``training``, ``validation`` or ``sanity check``.
    """

    def __init__(self, rank: int, where: str) -> None:
        super().__init__(sgd)
        self.rank = rank
        self.where = where
        self.sent = False

    def terminate(self) -> None:
        if self.global_rank == self.rank and not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.where == "training" and batch_idx == 2:
            self.terminate()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.where == ("sanity check" if self.trainer.sanity_checking else "validation"):
            self.terminate()
        return super().validation_step(batch, batch_idx)


class Notes(pl.Callback):
    """What a callback sees of the interruption."""

    seen: str = ""

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.seen = type(exception).__name__


@dataclass(frozen=True)
class Stopped:
    """How a fit ended."""

    global_step: int
    message: str
    code: object
    seen: str
    again: int
    users_handler_called: int
    handler_restored: bool


def stop(context: RankContext, rank: int, where: str) -> Stopped:
    calls: list[int] = []

    def users_handler(signum: int, frame: Any) -> None:
        calls.append(signum)

    before = signal.signal(signal.SIGTERM, users_handler)
    try:
        batches = loader_of(make_batches(context.world_size, BATCHES)[context.rank])
        notes = Notes()
        trainer = trainer_on_pool(
            context, strategy_of(), callbacks=[notes], num_sanity_val_steps=1, val_check_interval=4, max_epochs=2
        )
        with pytest.raises(SIGTERMException) as raised:
            trainer.fit(Interrupted(rank, where), batches, batches)
        restored = signal.getsignal(signal.SIGTERM) is users_handler
        again = trainer_on_pool(context, strategy_of())
        again.fit(OddModule(sgd), batches)
        return Stopped(
            trainer.global_step,
            str(raised.value),
            raised.value.code,
            notes.seen,
            again.global_step,
            len(calls),
            restored,
        )
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("where", "steps"),
    [("training", 4), ("validation", 5), ("sanity check", 1)],  # the vote is read one batch after it is cast
)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_sigterm_on_one_rank_stops_all_at_the_same_step(ranks: RankPool, rank: int, where: str, steps: int) -> None:
    got = ranks.run(stop, layout={"a": [0, 1], "b": [2]}, args=(rank, where), deadline_s=30)
    for number, stopped in enumerate(got):
        assert stopped.global_step == steps
        assert f"rank {rank} " in stopped.message
        assert stopped.code is None, "exit status 0, as under Lightning's ddp"
        assert stopped.seen == "SIGTERMException"
        assert stopped.again == BATCHES
        assert stopped.users_handler_called == (1 if number == rank else 0)
        assert stopped.handler_restored


def stop_validation(context: RankContext) -> list[str]:
    """Everybody is sent one, in ``trainer.validate`` alone, under ours and ddp; the Trainer has fitted before."""
    ended = []
    for strategy in strategies():
        batches = loader_of(make_batches(context.world_size, BATCHES)[context.rank])
        trainer = trainer_on_pool(context, strategy)
        trainer.fit(OddModule(sgd), batches)
        before = signal.getsignal(signal.SIGTERM)
        try:
            trainer.validate(Everywhere(), batches, verbose=False)
            ended.append("ran to its end")
        except SIGTERMException:
            ended.append("stopped")
        assert signal.getsignal(signal.SIGTERM) is before
    return ended


class Everywhere(OddModule):
    def __init__(self) -> None:
        super().__init__(sgd)

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().validation_step(batch, batch_idx)


def test_sigterm_in_validate_alone_is_lightnings(ranks: RankPool) -> None:
    for ours, ddp in ranks.run(stop_validation, world_size=2):
        assert ours == ddp == "stopped"
