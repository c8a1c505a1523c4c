"""A rank that raises, in whatever phase: every other rank raises an error that names it, within seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import nn

from lightning_dist import HierDistStrategy
from lightning_dist.errors import CollectiveError, CollectiveTimeoutError
from tests.distributed.lightning_runs import OddModule, loader_of, make_batches, sgd, trainer_on_pool
from tests.support.ranks import RankPool, RanksFailed
from tests.support.tasks import RankContext

PHASES = [
    "setup",
    "configure_optimizers",
    "on_fit_start",
    "train_dataloader",
    "training_step",
    "backward",
    "on_train_batch_end",
    "validation_step",
    "on_train_epoch_end",
    "on_save_checkpoint",
]


class Raising(OddModule):
    """Raises on one rank in one phase; has buffers to synchronise."""

    def __init__(self, phase: str, rank: int) -> None:
        super().__init__(sgd, make_model=lambda: nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 3)))
        self.phase = phase
        self.rank = rank

    def reach(self, phase: str) -> None:
        if phase == self.phase and self.global_rank == self.rank:
            raise ZeroDivisionError(f"raised in {phase}")

    def setup(self, stage: str) -> None:
        self.reach("setup")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.reach("configure_optimizers")
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        self.reach("on_fit_start")

    def train_dataloader(self) -> Any:
        self.reach("train_dataloader")
        return loader_of(make_batches(self.trainer.world_size, 4)[self.global_rank])

    def val_dataloader(self) -> Any:
        return loader_of(make_batches(self.trainer.world_size, 2)[self.global_rank])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1:
            self.reach("training_step")
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.reach("backward")

    def on_train_batch_end(self, *args: Any) -> None:
        self.reach("on_train_batch_end")

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.reach("validation_step")
        return super().validation_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.reach("on_train_epoch_end")

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.reach("on_save_checkpoint")


def fit(context: RankContext, phase: str, rank: int) -> None:
    strategy = HierDistStrategy(sync={"timeout_s": 120.0})
    trainer = trainer_on_pool(
        context, strategy, enable_checkpointing=True, default_root_dir=context.tmp_path, max_epochs=2
    )
    trainer.fit(Raising(phase, rank))


@pytest.mark.parametrize(
    ("phase", "rank"),
    [*((phase, 1) for phase in PHASES), *((phase, 0) for phase in ("setup", "training_step", "on_train_batch_end"))],
)
def test_others_name_the_rank_that_raised(ranks: RankPool, phase: str, rank: int) -> None:
    """Before the deadline of an operation, which is longer than the call's."""
    with pytest.raises(RanksFailed) as caught:
        ranks.run(fit, layout={"a": [0, 1], "b": [2]}, args=(phase, rank), fresh=True, deadline_s=60)
    failures = {failure.rank: failure for failure in caught.value.failures}
    assert f"ZeroDivisionError: raised in {phase}" in failures.pop(rank).summary
    assert failures, "the others cannot go on"
    for other, failure in failures.items():
        assert failure.kind == "raised", f"rank {other}: {failure}"
        assert f"rank {rank} (host" in failure.summary
        assert f"raised in {phase}" in failure.summary


OPERATIONS: dict[str, Callable[[Strategy], object]] = {
    "barrier": lambda strategy: strategy.barrier(),
    "reduce": lambda strategy: strategy.reduce(torch.ones(3)),
    "broadcast": lambda strategy: strategy.broadcast("word"),
    "all_gather": lambda strategy: strategy.all_gather(torch.ones(3)),
}


class FailsAndStays(OddModule):
    """Rank 0 leaves word of a failure and keeps its connections, while the others wait for it in an operation."""

    def __init__(self, operation: str, folder: Path) -> None:
        super().__init__(sgd)
        self.operation, self.folder = operation, folder
        self.has_heard = False

    def on_train_start(self) -> None:
        strategy = self.trainer.strategy
        assert isinstance(strategy, HierDistStrategy)
        assert strategy._run is not None
        if self.global_rank:
            try:
                OPERATIONS[self.operation](strategy)
            except CollectiveError:
                (self.folder / f"{self.global_rank}").touch()
                raise
            return
        strategy._run.testimony.post("rank 0 (host a): its disk is full", own_fault=True)
        give_up = time.monotonic() + 30
        while not self.has_heard and time.monotonic() < give_up:
            self.has_heard = len(list(self.folder.iterdir())) == self.trainer.world_size - 1
            time.sleep(0.05)
        raise ZeroDivisionError("at last")


def fail_and_stay(context: RankContext, operation: str, folder: str) -> tuple[bool, str]:
    module = FailsAndStays(operation, Path(folder))
    trainer = trainer_on_pool(context, HierDistStrategy(sync={"timeout_s": 120.0}))
    with pytest.raises((CollectiveError, ZeroDivisionError)) as caught:
        trainer.fit(module, loader_of(make_batches(context.world_size, 4)[context.rank]))
    return module.has_heard, str(caught.value)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_who_waits_learns_of_a_rank_that_failed_and_stays(ranks: RankPool, operation: str, tmp_path: Path) -> None:
    said = ranks.run(fail_and_stay, world_size=3, args=(operation, str(tmp_path)), fresh=True, deadline_s=90)
    assert said[0] == (True, "at last")
    for _, text in said[1:]:
        assert "rank 0 (host a): its disk is full" in text


def wait_in_vain(context: RankContext) -> str:
    """Rank 1 sleeps longer than the deadline that the strategy was given as Lightning's ddp takes it."""
    strategy = HierDistStrategy(timeout=timedelta(seconds=2))
    trainer = trainer_on_pool(context, strategy)
    with pytest.raises(CollectiveTimeoutError) as caught:
        trainer.fit(Sleeping(sgd), loader_of(make_batches(context.world_size, 4)[context.rank]))
    return str(caught.value)


class Sleeping(OddModule):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2 and self.global_rank == 1:
            time.sleep(8)
        return super().training_step(batch, batch_idx)


def test_timeout_is_that_of_every_operation(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:  # rank 1 wakes up to find the others gone
        ranks.run(wait_in_vain, world_size=2, fresh=True, deadline_s=30)
    assert [failure.rank for failure in caught.value.failures if failure.kind == "raised"] in ([1], [])
