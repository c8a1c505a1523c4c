"""A rank that fails while it trains: its own error is shown on it, and all others end by one that names it."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from tests.distributed.lightning_runs import (
    Batch,
    OddModule,
    loader_of,
    make_batches,
    mse,
    sgd,
    strategy_of,
    trainer_on_pool,
)
from tests.faults.fits import ending_of_fit
from tests.faults.runs import HOSTS
from tests.support.faults import InjectedError
from tests.support.ranks import Died, RankPool
from tests.support.tasks import RankContext

PHASES = ("setup", "configure_optimizers", "forward", "backward", "optimizer_step", "validation_step")
TIMEOUT_S = 6.0
PATIENT_S = 120.0
"""Longer than a call may take: with it, ranks that are told of a failure only when their wait is over fail the test."""


class Faulty(OddModule):
    """Fails on one rank in one phase, in the second batch where there are batches."""

    def __init__(self, rank: int, phase: str, fail: Any) -> None:
        super().__init__(sgd)
        self._faulty_rank = rank
        self._phase = phase
        self._fail = fail
        self.net[2].weight.register_hook(lambda gradient: self._at("backward", gradient))

    def setup(self, stage: str) -> None:
        self._at("setup")

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self._at("forward")
        return mse(self.net, batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self._at("validation_step")
        return super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self._at("configure_optimizers")
        return super().configure_optimizers()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self._at("optimizer_step")

    def _at(self, phase: str, value: Any = None) -> Any:
        early = phase in ("setup", "configure_optimizers", "validation_step")
        if (self.global_rank, phase) == (self._faulty_rank, self._phase) and (early or self.global_step >= 1):
            self._fail()
        return value


def raise_injected() -> None:
    raise InjectedError("the disk of this rank is full")


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(context: RankContext, rank: int, phase: str, kill: bool) -> dict[str, Any]:
    """How this rank's fit ended."""
    module = Faulty(rank, phase, kill_self if kill else raise_injected)
    trainer = trainer_on_pool(context, strategy_of(sync={"timeout_s": TIMEOUT_S if kill else PATIENT_S}))
    batches = make_batches(context.world_size, 5)[context.rank]
    return ending_of_fit(trainer, module, loader_of(batches), loader_of(batches))


@pytest.mark.parametrize(
    ("phase", "rank"), [(phase, 1 + 2 * (number % 2)) for number, phase in enumerate(PHASES)], ids=PHASES
)
def test_an_error_of_the_users_code_ends_all_ranks(ranks: RankPool, phase: str, rank: int) -> None:
    ended = ranks.run(train, layout=HOSTS, args=(rank, phase, False), init_group=False, fresh=True, deadline_s=60)
    assert ended[rank]["text"].startswith("InjectedError: the disk of this rank is full")
    host = "a" if rank < 2 else "b"
    for other in (other for other in range(4) if other != rank):
        assert ended[other]["is_ours"], ended[other]
        assert f"rank {rank} (host {host})" in ended[other]["text"]
        assert "the disk of this rank is full" in ended[other]["text"]


class FullDisk(OddModule):
    """Fails in the third batch of rank 1."""

    def __init__(self) -> None:
        super().__init__(sgd)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        if (self.global_rank, batch_idx) == (1, 2):
            raise_injected()
        return mse(self.net, batch)


def train_and_save(context: RankContext, mode: str) -> dict[str, Any]:
    """How this rank's fit ended, with a callback that saves on exceptions."""
    trainer = trainer_on_pool(
        context,
        strategy_of(parallel=mode, sync={"timeout_s": PATIENT_S}),
        callbacks=[OnExceptionCheckpoint(context.tmp_path)],
        enable_checkpointing=True,
        default_root_dir=context.tmp_path,
    )
    return ending_of_fit(trainer, FullDisk(), loader_of(make_batches(context.world_size, 16)[context.rank]))


@pytest.mark.parametrize("mode", ["ddp", "zero2"])
def test_an_error_is_told_before_callbacks_that_save_wait_for_the_others(ranks: RankPool, mode: str) -> None:
    """If it were told after them only, all would wait for the others."""
    ended = ranks.run(train_and_save, layout={"a": [0, 1]}, args=(mode,), init_group=False, fresh=True, deadline_s=60)
    assert "rank 1 (host a)" in ended[0]["text"]
    assert "the disk of this rank is full" in ended[0]["text"]
    assert "InjectedError: the disk of this rank is full" in ended[1]["trace"], "whatever saving then said"


@pytest.mark.parametrize(("phase", "rank"), [("setup", 3), ("backward", 0), ("validation_step", 2)])
def test_a_rank_killed_while_training_is_named(ranks: RankPool, phase: str, rank: int) -> None:
    ended = ranks.run(train, layout=HOSTS, args=(rank, phase, True), init_group=False, may_die=[rank], deadline_s=60)
    host = "a" if rank < 2 else "b"
    for other, ending in enumerate(ended):
        if other == rank:
            assert isinstance(ending, Died)
            continue
        assert ending["is_ours"], ending
        assert f"rank {rank} (host {host})" in ending["text"], ending
