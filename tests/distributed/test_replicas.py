"""The newest checkpoint in memory: it outlives the ranks, and a run that starts again reads it instead of storage."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import psutil
import pytest
import torch

from lightning_dist.checkpoint.keeper import client
from lightning_dist.checkpoint.local_disk import LocalFolder
from tests.distributed.lightning_runs import strategy_of, trainer_on_pool
from tests.distributed.pipeline_runs import StageCase, StageLearner
from tests.support.processes import is_alive
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

REPLICA = {"mode": "async_sharded", "replica": "memory", "replica_limit": "64MB"}


@contextlib.contextmanager
def ending_keepers(folder: Path) -> Iterator[None]:
    """At the end no keeper of the checkpoints in a folder is left."""
    try:
        yield
    finally:
        keeper = client.find(client.name_of(str(folder)))
        if keeper is not None:
            process = psutil.Process(keeper.about()["process"])
            keeper.end()
            assert not is_alive(process)


@contextlib.contextmanager
def refusing_reads() -> Iterator[None]:
    """Inside, whoever looks into a folder on disk fails."""

    def refuse(self: LocalFolder, *_: Any) -> Any:
        raise AssertionError(f"{self.url} is read")

    with contextlib.ExitStack() as patches:
        for name in ("read", "read_into", "list"):
            patches.enter_context(patch.object(LocalFolder, name, refuse))
        yield


def _trainer(context: RankContext, parallel: str, checkpoint: Any, epochs: int, *callbacks: pl.Callback) -> pl.Trainer:
    strategy = strategy_of(parallel=parallel, checkpoint=checkpoint)
    sizes = {"limit_train_batches": 2, "limit_val_batches": 0}
    return trainer_on_pool(context, strategy, callbacks=list(callbacks), max_epochs=epochs, **sizes)


class SaveEachEpoch(pl.Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(f"{self.folder}/{trainer.global_step}.ckpt")


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def train(context: RankContext, folder: str, parallel: str, others: dict[str, Any] | None = None) -> None:
    checkpoint = {**REPLICA, **(others or {})}
    _trainer(context, parallel, checkpoint, 2, SaveEachEpoch(folder)).fit(StageLearner(StageCase(optimizer="adamw")))


def go_on(context: RankContext, path: str, parallel: str, reads_storage: bool) -> tuple[dict[str, torch.Tensor], int]:
    checkpoint = "async_sharded" if reads_storage else REPLICA
    module = StageLearner(StageCase(optimizer="adamw"))
    trainer = _trainer(context, parallel, checkpoint, 3)
    with contextlib.nullcontext() if reads_storage else refusing_reads():
        trainer.fit(module, ckpt_path=path)
    return weights_of(module), trainer.global_step


@pytest.mark.parametrize("parallel", ["ddp", "zero2"])
def test_a_run_goes_on_from_memory_and_leaves_storage_alone(ranks: RankPool, tmp_path: Path, parallel: str) -> None:
    with ending_keepers(tmp_path):
        ranks.run(train, world_size=2, args=(str(tmp_path), parallel))
        keeper = client.find(client.name_of(str(tmp_path)))
        assert keeper is not None
        assert [name.partition("@")[0] for name in keeper.folders()] == ["4.ckpt"]  # the last one only
        assert keeper.about()["used_bytes"] < 1.1 * sum(path.stat().st_size for path in (tmp_path / "4.ckpt").iterdir())
        expected = ranks.run(go_on, world_size=2, args=(str(tmp_path / "4.ckpt"), parallel, True))
        for path in ("4.ckpt", "last.ckpt"):
            for got, wanted in zip(
                ranks.run(go_on, world_size=2, args=(str(tmp_path / path), parallel, False)), expected, strict=True
            ):
                assert got[1] == wanted[1] == 6
                for name, value in wanted[0].items():
                    assert torch.equal(got[0][name], value), name


def test_what_is_not_in_memory_is_read_from_storage(ranks: RankPool, tmp_path: Path) -> None:
    with ending_keepers(tmp_path):
        ranks.run(train, world_size=2, args=(str(tmp_path), "ddp"))
        with pytest.raises(Exception, match="is read"):
            ranks.run(go_on, world_size=2, args=(str(tmp_path / "2.ckpt"), "ddp", False))
    expected = ranks.run(go_on, world_size=2, args=(str(tmp_path / "2.ckpt"), "ddp", True))
    assert [step for _, step in expected] == [6, 6]
    assert os.listdir(tmp_path)
