"""A run that is asked to stop saves first, at the same step on all ranks, and its next start goes on from there."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_dist.elastic.detect.board import FILE, Board
from lightning_dist.elastic.detect.phases import Order
from tests.distributed.restarted_runs import MEMORY, Start, fit, prepare
from tests.distributed.test_going_on import STORED, assert_same, uninterrupted
from tests.support.keepers import ending_keepers
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext


class Signals(pl.Callback):
    """Sends itself a signal, on one rank, in the middle of a step."""

    def __init__(self, rank: int, step: int, number: int = signal.SIGTERM) -> None:
        self._rank = rank
        self._step = step
        self._number = number

    def on_before_zero_grad(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step and trainer.global_rank == self._rank:
            self._step = -1
            os.kill(os.getpid(), self._number)


def stop(context: RankContext, start: Start, callback: pl.Callback) -> str:
    """How the fit ended."""
    with pytest.raises(SIGTERMException) as raised:
        fit(context, start, callback)
    assert raised.value.code is None  # exit status 0
    return str(raised.value)


def interrupted(start: Start) -> int:
    """The step of the only checkpoint that there is."""
    (saved,) = os.listdir(start.checkpoints)
    return int(saved.removeprefix("interrupted-step=").removesuffix(".ckpt"))


@pytest.mark.parametrize(
    ("world_size", "number"),
    [
        (2, signal.SIGTERM),
        (1, signal.SIGUSR1),
        pytest.param(2, signal.SIGUSR1, marks=pytest.mark.sweep),
        pytest.param(1, signal.SIGTERM, marks=pytest.mark.sweep),
    ],
)
def test_a_signal_on_one_rank_is_a_checkpoint_in_storage(
    ranks: RankPool, tmp_path: Path, world_size: int, number: int
) -> None:
    start = Start(tmp_path / "run", checkpoint=STORED)
    prepare(start)
    last, late = world_size - 1, int(world_size > 1)  # among several the vote is read one step later
    for said in ranks.run(stop, world_size=world_size, args=(start, Signals(last, 2, number))):
        assert f"SIGTERM received by rank {last}" in said
    assert interrupted(start) == 3 + late
    again = replace(start, round=2)
    ranks.run(stop, world_size=world_size, args=(again, Signals(0, 5, number)))
    assert interrupted(start) == 6 + late  # it takes the place of the one before
    got = ranks.run(fit, world_size=world_size, args=(replace(start, round=3),))
    if world_size == 2:
        assert_same(got, 7, uninterrupted(ranks, tmp_path / "whole"))
    assert got[0][0] == 6 + late


@pytest.mark.sweep
@pytest.mark.parametrize("checkpoint", [MEMORY, "full"], ids=["replica", "full"])
def test_it_is_saved_as_others_are(ranks: RankPool, tmp_path: Path, checkpoint: Any) -> None:
    start = Start(tmp_path / "run", checkpoint=checkpoint)
    prepare(start)
    with ending_keepers(start.checkpoints):
        ranks.run(stop, world_size=2, args=(start, Signals(1, 2)))
        assert interrupted(start) == 4
        got = ranks.run(fit, world_size=2, args=(replace(start, round=2),))
    assert_same(got, 4, uninterrupted(ranks, tmp_path / "whole"))


def test_gradients_that_are_being_accumulated_are_not_lost(ranks: RankPool, tmp_path: Path) -> None:
    start = Start(tmp_path / "run", checkpoint=STORED, others={"accumulate_grad_batches": 3})
    prepare(start)
    whole = ranks.run(fit, world_size=2, args=(prepare(replace(start, folder=tmp_path / "whole")),))[0][1]
    ranks.run(stop, world_size=2, args=(start, SignalsInBatch(1, batch=4)))
    assert interrupted(start) == 2
    assert_same(ranks.run(fit, world_size=2, args=(replace(start, round=2),)), 2, whole)


class SignalsInBatch(Signals):
    """The same, in a micro-batch of the first epoch."""

    def __init__(self, rank: int, batch: int) -> None:
        super().__init__(rank, step=-1)
        self._batch = batch

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        if index == self._batch and trainer.global_rank == self._rank:
            self._batch = -1
            os.kill(os.getpid(), self._number)


class Orders(pl.Callback):
    """What an agent does: it orders a rank to save and stop. Each rank's order comes at one moment of its training."""

    def __init__(self, start: Start, step: int, order: Order = Order.SNAPSHOT_AND_STOP) -> None:
        self._start = start
        self._step = step
        self._order = order

    def on_before_zero_grad(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            board = Board.open(self._start.agent / FILE)
            board.cell(trainer.local_rank).order(self._order, self._start.round)
            board.close()


def test_memory_is_not_enough_where_the_host_leaves(ranks: RankPool, tmp_path: Path) -> None:
    start = Start(tmp_path / "run")
    prepare(start)
    with ending_keepers(start.checkpoints):
        ranks.run(stop, world_size=2, args=(start, Orders(start, 2, Order.SNAPSHOT_AND_DEPART)))
        assert interrupted(start) == 4


@pytest.mark.parametrize("in_memory", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_an_agents_order_is_obeyed_and_answered(ranks: RankPool, tmp_path: Path, in_memory: bool) -> None:
    start = Start(tmp_path / "run", checkpoint={**MEMORY, "memory_every_n_steps": 100} if in_memory else STORED)
    prepare(start)
    with ending_keepers(start.checkpoints):
        for said in ranks.run(stop, world_size=2, args=(start, Orders(start, 2))):
            assert "asked to stop after step 4 by an agent" in said
        there = os.listdir(start.checkpoints) if start.checkpoints.exists() else []
        assert there == ([] if in_memory else ["interrupted-step=4.ckpt"])
        board = Board.open(start.agent / FILE)
        beats = [board.cell(index).read() for index in (0, 1)]
        board.close()
        assert [(beat.answered_step, beat.snapshot_step, beat.step) for beat in beats if beat] == [(4, 4, 4)] * 2
        got = ranks.run(fit, world_size=2, args=(replace(start, round=2),))
    assert_same(got, 4, uninterrupted(ranks, tmp_path / "whole"))
