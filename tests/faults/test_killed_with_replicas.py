"""Ranks that are killed leave their newest checkpoint in memory, and new ones go on from there."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch

from lightning_dist.checkpoint.catalog import survey
from lightning_dist.checkpoint.keeper import client
from lightning_dist.checkpoint.storage import open_folder
from tests.distributed import test_replicas as replicas
from tests.distributed.pipeline_runs import StageCase, StageLearner
from tests.support.keepers import ended, ending_keepers
from tests.support.ranks import Died, RankPool
from tests.support.tasks import RankContext


class DieLater(pl.Callback):
    """Ends the process in the first step after the second checkpoint."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 5:
            trainer.strategy._saver.finish()
            os.kill(os.getpid(), signal.SIGKILL)


def train_and_die(context: RankContext, folder: str) -> None:
    trainer = replicas._trainer(context, "zero2", replicas.REPLICA, 3, replicas.SaveEachEpoch(folder), DieLater())
    trainer.fit(StageLearner(StageCase(optimizer="adamw")))


def go_on(context: RankContext, path: str, reads_storage: bool) -> tuple[dict[str, torch.Tensor], int]:
    return replicas.go_on(context, path, "zero2", reads_storage)


def test_new_ranks_go_on_from_the_memory_of_killed_ones(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "4.ckpt")
    with ending_keepers(tmp_path):
        died = ranks.run(train_and_die, world_size=2, args=(str(tmp_path),), may_die=[0, 1])
        assert [type(each) for each in died] == [Died, Died]
        expected = ranks.run(go_on, world_size=2, args=(path, True))
        for (weights, step), (wanted, _) in zip(
            ranks.run(go_on, world_size=2, args=(path, False)), expected, strict=True
        ):
            assert step == 6
            for name, value in wanted.items():
                assert torch.equal(weights[name], value), name


class KillKeeper(pl.Callback):
    """Ends the keeper in the first step after the first checkpoint."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.strategy._saver.finish()
            if trainer.is_global_zero:  # the others wait for it in the next step
                keeper = client.find(client.name_of(self.folder))
                assert keeper is not None
                process = psutil.Process(keeper.about()["process"])
                process.kill()
                ended(process)


def train_on(context: RankContext, folder: str) -> int:
    callbacks = (replicas.SaveEachEpoch(folder), KillKeeper(folder))
    trainer = replicas._trainer(context, "zero2", replicas.REPLICA, 3, *callbacks)
    with pytest.warns(UserWarning, match="(is not kept|stay) in memory: keeper .* failed"):
        trainer.fit(StageLearner(StageCase(optimizer="adamw")))
    return trainer.global_step


def test_a_killed_keeper_costs_no_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    with ending_keepers(tmp_path):
        assert ranks.run(train_on, world_size=2, args=(str(tmp_path),)) == [6, 6]
        assert client.find(client.name_of(str(tmp_path))) is None
    found = survey(open_folder(tmp_path), full=True)
    assert [(entry.name, entry.problem) for entry in found] == [(f"{step}.ckpt", None) for step in (6, 4, 2)]
