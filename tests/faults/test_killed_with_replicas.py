"""Ranks that are killed leave their newest checkpoint in memory, and new ones go on from there."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from tests.distributed import test_replicas as replicas
from tests.distributed.pipeline_runs import StageCase, StageLearner
from tests.support.keepers import ending_keepers
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
