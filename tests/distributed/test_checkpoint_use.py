"""What users of Lightning's checkpoints do, with sharded ones; and writes that are slow or fail."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dist import AsyncShardedCheckpoint
from lightning_dist.build.checkpoints import COPY, WRITE
from lightning_dist.checkpoint.background import NICE
from lightning_dist.checkpoint.catalog import open_checkpoint, survey
from lightning_dist.checkpoint.local_disk import LocalFolder
from lightning_dist.checkpoint.storage import open_folder
from lightning_dist.checkpoint.whole import read_tensor
from lightning_dist.modes import checkpoints
from tests.distributed.lightning_runs import strategy_of, trainer_on_pool
from tests.distributed.pipeline_runs import StageCase, StageLearner
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

ASYNC = {"mode": "async_sharded"}


def _trainer(context: RankContext, *callbacks: pl.Callback, **arguments: Any) -> pl.Trainer:
    strategy = strategy_of(parallel=arguments.pop("parallel", "zero2"), checkpoint=arguments.pop("checkpoint", ASYNC))
    return trainer_on_pool(context, strategy, callbacks=list(callbacks), **arguments)


def learner() -> StageLearner:
    return StageLearner(StageCase(optimizer="adamw"))


@contextlib.contextmanager
def writing(before: Callable[[LocalFolder, str], None]) -> Iterator[None]:
    """Inside, something happens before each file is written."""
    write = LocalFolder.write

    def slow(self: LocalFolder, name: str, buffers: Any) -> None:
        before(self, name)
        write(self, name, buffers)

    with patch.object(LocalFolder, "write", slow):
        yield


# -- habits ------------------------------------------------------------------------------------------------------------


def keep_the_best(context: RankContext, folder: str) -> dict[str, Any]:
    keep = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, every_n_epochs=1, save_last=True)
    enabled: dict[str, Any] = {"limit_train_batches": 2, "limit_val_batches": 2, "enable_checkpointing": True}
    trainer, module = _trainer(context, keep, max_epochs=4, **enabled), learner()
    trainer.fit(module)
    scores = {Path(path).name: float(score) for path, score in keep.best_k_models.items()}
    validated = trainer.validate(module, ckpt_path="best", verbose=False)[0]["val_loss"]
    on = _trainer(context, ModelCheckpoint(folder, save_last=True), max_epochs=6, **enabled)
    on.fit(learner(), ckpt_path=f"{folder}/last.ckpt")
    return {
        "scores": scores,
        "best": Path(keep.best_model_path).name,
        "validated": validated,
        "went on": (on.global_step, on.current_epoch),
    }


def test_the_best_are_kept_and_the_last_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(keep_the_best, world_size=2, args=(str(tmp_path / "kept"),))
    assert first == second
    assert first["validated"] == pytest.approx(min(first["scores"].values()), abs=1e-6)
    assert first["scores"][first["best"]] == min(first["scores"].values())
    assert first["went on"] == (12, 6)
    found = survey(open_folder(tmp_path / "kept"), full=True)
    assert [entry.problem for entry in found] == [None] * len(found)
    assert {*first["scores"], "last.ckpt"} <= {entry.name for entry in found}
    assert len(found) == 5  # two of the best and the last; what the second fit kept and its last


class SaveEachStep(pl.Callback):
    """Sets all weights to the number of the step, saves, and goes on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.fill_(trainer.global_step)
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def save_slowly(context: RankContext, folder: str, parallel: str) -> tuple[list[str], set[int], int]:
    trainer = _trainer(
        context,
        SaveEachStep(Path(folder)),
        parallel=parallel,
        max_epochs=1,
        limit_train_batches=3,
        limit_val_batches=0,
    )
    go_on = threading.Event()
    nice: set[int] = set()

    def wait(folder: LocalFolder, name: str) -> None:
        nice.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        go_on.wait(0.5)

    with writing(wait):
        trainer.fit(learner())
    names = [event.name for event in trainer.strategy.events.snapshot() if event.name in (COPY, WRITE)]
    return names, nice, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.parametrize("parallel", ["ddp", "zero2"])
def test_a_checkpoint_has_one_steps_values_however_slowly_it_is_written(
    ranks: RankPool, tmp_path: Path, parallel: str
) -> None:
    for names, nice_writing, nice_training in ranks.run(save_slowly, world_size=2, args=(str(tmp_path), parallel)):
        assert (names.count(COPY), names.count(WRITE)) == (3, 3)
        assert nice_writing == {max(NICE, nice_training)}  # it stands back where there is no core for it
    for step in (1, 2, 3):
        checkpoint = open_checkpoint(open_folder(tmp_path / f"{step}.ckpt"), full=True)
        weights = [name for name in checkpoint.manifest.tensors if name.startswith("model/")]
        assert weights
        for name in weights:
            assert bool((read_tensor(checkpoint, name) == step).all()), name
        writers = {entry.rank for entry in checkpoint.manifest.files.values()}
        assert writers == {0, 1}  # also under ddp, where each has it all


def skip_while_busy(context: RankContext, folder: str) -> int:
    trainer = _trainer(
        context,
        SaveEachStep(Path(folder)),
        checkpoint={**ASYNC, "when_busy": "skip"},
        max_epochs=1,
        limit_train_batches=4,
        limit_val_batches=0,
    )
    done = threading.Event()

    def wait_for_the_end(folder: LocalFolder, name: str) -> None:
        if context.rank == 1:  # one busy rank is enough
            done.wait(30)

    class End(pl.Callback):
        """The write may end with the training; asked for the saver while it is there."""

        skipped = 0

        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.skipped = trainer.strategy._saver.skipped
            done.set()

    end = End()
    trainer.callbacks.append(end)
    with writing(wait_for_the_end):
        trainer.fit(learner())
    return end.skipped


def test_checkpoints_are_skipped_by_all_ranks_alike_while_one_is_busy(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(skip_while_busy, world_size=2, args=(str(tmp_path),)) == [3, 3]
    assert [entry.name for entry in survey(open_folder(tmp_path))] == ["1.ckpt"]


def read_while_others_remove(context: RankContext, folder: str) -> dict[str, Any]:
    """Resume; whoever removes the checkpoint at each read of it does not."""
    limits: dict[str, Any] = {"limit_train_batches": 1, "limit_val_batches": 0, "enable_checkpointing": True}
    _trainer(context, AsyncShardedCheckpoint(folder), max_epochs=1, **limits).fit(learner())
    path, removals = f"{folder}/epoch=0-step=1.ckpt", 0
    read_into = LocalFolder.read_into

    def read(self: LocalFolder, *arguments: Any) -> None:
        nonlocal removals
        removals += 1
        with pytest.warns(UserWarning, match="stays, since it is being read by"):
            checkpoints.remove(path)
        read_into(self, *arguments)

    trainer = _trainer(context, max_epochs=2, limit_train_batches=1, limit_val_batches=0)
    with patch.object(LocalFolder, "read_into", read):
        trainer.fit(learner(), ckpt_path=path)
    return {"step": trainer.global_step, "removals": removals}


def test_what_is_being_read_is_not_removed(ranks: RankPool, tmp_path: Path) -> None:
    ended = ranks.run(read_while_others_remove, world_size=2, args=(str(tmp_path),))
    assert [each["step"] for each in ended] == [2, 2]
    assert sum(each["removals"] for each in ended) > 2
    path = tmp_path / "epoch=0-step=1.ckpt"
    assert not list(path.glob("READING-*"))
    checkpoints.remove(str(path))
    assert list(tmp_path.iterdir()) == []


# -- failures ----------------------------------------------------------------------------------------------------------


def fail_on(context: RankContext, folder: str, on_failure: str, failing_step: int) -> dict[str, Any]:
    """One rank's storage refuses one save; what came of it."""
    trainer = _trainer(
        context,
        SaveEachStep(Path(folder)),
        checkpoint={**ASYNC, "on_failure": on_failure},
        max_epochs=1,
        limit_train_batches=3,
        limit_val_batches=0,
    )

    def refuse(folder: LocalFolder, name: str) -> None:
        if context.rank == 1 and folder.url.endswith(f"/{failing_step}.ckpt"):
            raise OSError(28, "No space left on device")

    error = ""
    with writing(refuse), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            trainer.fit(learner())
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return {"error": error, "warned": [str(w.message) for w in seen if "checkpoint" in str(w.message)]}


@pytest.mark.parametrize("failing_step", [1, 3])
def test_a_failed_write_stops_all_ranks_alike(ranks: RankPool, tmp_path: Path, failing_step: int) -> None:
    results = ranks.run(fail_on, world_size=2, args=(str(tmp_path), "stop", failing_step), fresh=True)
    for result in results:
        assert result["error"].startswith("CheckpointError: saving "), result
        assert "rank 1" in result["error"]
        assert "No space left on device" in result["error"]
    whole = [entry.name for entry in survey(open_folder(tmp_path)) if entry.problem is None]
    assert whole == [f"{step}.ckpt" for step in reversed(range(1, failing_step))]


def test_a_failed_write_may_be_a_warning(ranks: RankPool, tmp_path: Path) -> None:
    for result in ranks.run(fail_on, world_size=2, args=(str(tmp_path), "warn", 2)):
        assert result["error"] == ""
        assert any("could not be written" in said and "rank 1" in said for said in result["warned"]), result
    whole = [entry.name for entry in survey(open_folder(tmp_path)) if entry.problem is None]
    assert whole == ["3.ckpt", "1.ckpt"]
