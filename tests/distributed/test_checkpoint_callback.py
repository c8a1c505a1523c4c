"""Sharded checkpoints by a callback alone: under our strategy, under Lightning's own, and loaded without either."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy

from lightning_dist import AsyncShardedCheckpoint, load_from_checkpoint
from lightning_dist.build.checkpoints import WRITE
from lightning_dist.build.writer import WRITTEN
from lightning_dist.checkpoint.catalog import open_checkpoint, survey
from lightning_dist.checkpoint.manifest import MARKER_FILE
from lightning_dist.checkpoint.storage import open_folder
from lightning_dist.errors import CombinationError
from lightning_dist.planning.save_interval import FIRST_STEPS, SaveInterval
from tests.distributed.lightning_runs import strategy_of, trainer_on_pool
from tests.distributed.pipeline_runs import StageCase, StageLearner
from tests.distributed.test_checkpoint_use import writing
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

CASE = StageCase(optimizer="adamw")


class Kept(DummyLogger):
    """Logs of checkpoints, with their step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:  # type: ignore[override]  # it takes anything
        if any(name.startswith("checkpoint/") for name in metrics):
            self.rows.append((step, dict(metrics)))


def _trainer(context: RankContext, strategy: Any, callback: pl.Callback, epochs: int, **others: Any) -> pl.Trainer:
    return trainer_on_pool(
        context,
        strategy,
        **others,
        callbacks=[callback],
        max_epochs=epochs,
        limit_train_batches=2,
        limit_val_batches=1,
        enable_checkpointing=True,
    )


def save_and_go_on(context: RankContext, folder: str, parallel: str) -> dict[str, Any]:
    """Two epochs and a third one, with files and with folders."""
    results: dict[str, Any] = {}
    for kind in (ModelCheckpoint, AsyncShardedCheckpoint):
        keep = kind(f"{folder}/{kind.__name__}", monitor="val_loss", save_top_k=2, save_last=True)
        make = DDPStrategy if parallel == "lightning" else lambda: strategy_of(parallel=parallel)
        _trainer(context, make(), keep, 2).fit(StageLearner(CASE))
        resumed = StageLearner(CASE)
        again = kind(f"{folder}/{kind.__name__}", monitor="val_loss", save_top_k=2, save_last=True)
        trainer = _trainer(context, make(), again, 3)
        trainer.fit(resumed, ckpt_path=f"{folder}/{kind.__name__}/last.ckpt")
        weights = {name: value.detach().clone() for name, value in resumed.net.state_dict().items()}
        best = {Path(path).name: float(score) for path, score in keep.best_k_models.items()}
        results[kind.__name__] = (weights, resumed.seen, trainer.global_step, best)
    return results


@pytest.mark.parametrize("parallel", ["lightning", "zero2"])
def test_folders_do_what_files_do(ranks: RankPool, tmp_path: Path, parallel: str) -> None:
    for result in ranks.run(save_and_go_on, world_size=2, args=(str(tmp_path), parallel)):
        files, folders = result["ModelCheckpoint"], result["AsyncShardedCheckpoint"]
        assert files[1:] == folders[1:]
        for name, value in files[0].items():
            assert torch.equal(value, folders[0][name]), name
    folder = tmp_path / "AsyncShardedCheckpoint"
    assert (folder / "last.ckpt").is_symlink()
    assert [entry.problem for entry in survey(open_folder(folder), full=True)] == [None] * 3  # the link is one of them
    manifest = open_checkpoint(open_folder(folder / "last.ckpt")).manifest
    assert manifest.record["step"] == 6
    assert {entry.rank for entry in manifest.files.values()} == {0, 1}


class LookAtLast(pl.Callback):
    """Where ``last.ckpt`` points while the second checkpoint is being written."""

    def __init__(self, folder: str, go_on: threading.Event) -> None:
        self.link = Path(folder) / "last.ckpt"
        self.go_on = go_on
        self.seen = ""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 2:
            self.seen = os.readlink(self.link)
            self.go_on.set()


def hold_the_second(context: RankContext, folder: str) -> str:
    go_on = threading.Event()
    look = LookAtLast(folder, go_on)

    def wait(folder: Any, name: str) -> None:
        if "epoch=1" in folder.url:
            go_on.wait(30)

    keep = AsyncShardedCheckpoint(folder, save_top_k=1, monitor="step", mode="max", save_last=True)
    trainer = _trainer(context, strategy_of(parallel="ddp"), keep, 3)
    trainer.callbacks.insert(0, look)
    with writing(wait):
        trainer.fit(StageLearner(CASE))
    return look.seen


def test_the_last_moves_once_a_checkpoint_is_committed(ranks: RankPool, tmp_path: Path) -> None:
    for seen in ranks.run(hold_the_second, world_size=2, args=(str(tmp_path),)):
        assert seen == "epoch=0-step=2.ckpt"
    assert os.readlink(tmp_path / "last.ckpt") == "epoch=2-step=6.ckpt"
    assert sorted(os.listdir(tmp_path)) == ["epoch=2-step=6.ckpt", "last.ckpt"]


def log_saves(context: RankContext, folder: str, parallel: str, mode: str) -> list[tuple[int | None, dict[str, float]]]:
    """Three epochs, each saved."""
    logger = Kept()
    keep: ModelCheckpoint = AsyncShardedCheckpoint(folder, save_top_k=-1, checkpoint=mode)
    strategy: Any = DDPStrategy() if parallel == "lightning" else strategy_of(parallel=parallel)
    if parallel == "ddp":  # the strategy alone
        keep, strategy = ModelCheckpoint(folder, save_top_k=-1), strategy_of(parallel=parallel, checkpoint=mode)
    trainer = _trainer(context, strategy, keep, 3, logger=logger)
    trainer.fit(StageLearner(CASE))
    if parallel != "lightning":
        events = [each for each in strategy.events.snapshot() if each.name in (WRITTEN, WRITE)]
        sizes = [each.attributes["size_bytes"] for each in events if each.name == WRITE]
        assert len(sizes) == 3
        assert sum(each.value for each in events if each.name == WRITTEN) >= sum(sizes)  # objects, too
    return logger.rows


@pytest.mark.parametrize(
    ("parallel", "mode"),
    [("lightning", "async_sharded"), ("zero2", "async_sharded"), ("ddp", "async_sharded"), ("zero2", "sharded")],
)
def test_what_each_took_is_logged_by_rank_0(ranks: RankPool, tmp_path: Path, parallel: str, mode: str) -> None:
    rows, others = ranks.run(log_saves, world_size=2, args=(str(tmp_path), parallel, mode))
    assert others == []
    assert [step for step, _ in rows][-1] == 6
    sizes = {open_checkpoint(open_folder(folder)).manifest.size_bytes for folder in tmp_path.iterdir()}
    for _, row in rows:
        assert row["checkpoint/total_bytes"] in sizes
        assert 0 < row["checkpoint/rank_bytes"] < row["checkpoint/total_bytes"]
        assert row["checkpoint/stall_s"] > 0
        rate = row["checkpoint/total_bytes"] / row["checkpoint/background_s"]
        assert row["checkpoint/bytes_per_s"] == pytest.approx(rate)
        assert row["checkpoint/skipped"] == 0
        assert mode == "async_sharded" or row["checkpoint/stall_s"] > row["checkpoint/background_s"]
    assert mode == "async_sharded" or [step for step, _ in rows] == [2, 4, 6]  # the next one, or the end


class Release(pl.Callback):
    """Lets the first checkpoint be written in the third epoch."""

    def __init__(self, go_on: threading.Event) -> None:
        self.go_on = go_on

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 2:
            self.go_on.set()


def log_skipped(context: RankContext, folder: str) -> list[tuple[int | None, dict[str, float]]]:
    go_on = threading.Event()
    logger = Kept()
    checkpoint = {"mode": "async_sharded", "when_busy": "skip"}
    keep = AsyncShardedCheckpoint(folder, save_top_k=-1, checkpoint=checkpoint)
    trainer = _trainer(context, strategy_of(parallel="ddp"), keep, 3, logger=logger)
    trainer.callbacks.insert(0, Release(go_on))
    with writing(lambda *_: go_on.wait(30) and None):
        trainer.fit(StageLearner(CASE))
    return logger.rows


def test_the_skipped_are_counted(ranks: RankPool, tmp_path: Path) -> None:
    rows, _ = ranks.run(log_skipped, world_size=2, args=(str(tmp_path),))
    skipped = rows[-1][1]["checkpoint/skipped"]
    assert skipped >= 1
    assert len(list(tmp_path.iterdir())) + skipped == 3


class ReleaseAtTheEnd(pl.Callback):
    """Lets the first checkpoint be written once training is over."""

    def __init__(self, go_on: threading.Event) -> None:
        self.go_on = go_on

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.go_on.set()


def skip_all_but_the_first(context: RankContext, folder: str, parallel: str, kind: str) -> tuple[str, str]:
    go_on = threading.Event()
    checkpoint = {"mode": "async_sharded", "when_busy": "skip"}
    make = strategy_of(parallel="ddp", checkpoint=checkpoint) if parallel == "ddp" else DDPStrategy()
    arguments: dict[str, Any] = {"monitor": "val_loss", "save_top_k": 1, "mode": "max"} if kind == "best" else {}
    if kind == "files":
        keep: ModelCheckpoint = ModelCheckpoint(folder)
    else:
        keep = AsyncShardedCheckpoint(folder, save_last=True, checkpoint=checkpoint, **arguments)
    trainer = _trainer(context, make, keep, 3)
    trainer.callbacks.insert(0, ReleaseAtTheEnd(go_on))
    module = StageLearner(CASE)

    def wait_before_committing(_: Any, name: str) -> None:
        if name == MARKER_FILE:
            go_on.wait(30)

    with writing(wait_before_committing), patch.object(module, "validation_step", rising(module)):
        trainer.fit(module)
    return keep.best_model_path, keep.last_model_path


def rising(module: pl.LightningModule) -> Any:
    def validation_step(batch: Any, batch_idx: int) -> None:
        module.log("val_loss", float(module.trainer.global_step))  # each is the best

    return validation_step


@pytest.mark.parametrize(
    ("parallel", "kind"), [("ddp", "newest"), ("lightning", "newest"), ("lightning", "best"), ("ddp", "files")]
)
def test_a_skipped_checkpoint_takes_no_others_place(ranks: RankPool, tmp_path: Path, parallel: str, kind: str) -> None:
    for best, last in ranks.run(skip_all_but_the_first, world_size=2, args=(str(tmp_path), parallel, kind)):
        if kind != "files":  # Lightning's callback does not learn that it was skipped
            assert (best, last) == (str(tmp_path / "epoch=0-step=2.ckpt"), str(tmp_path / "last.ckpt"))
    links = {"last.ckpt"} if kind != "files" else set()
    assert {path.name for path in tmp_path.iterdir()} == {"epoch=0-step=2.ckpt"} | links
    for path in tmp_path.iterdir():
        assert open_checkpoint(open_folder(path)).manifest.record["step"] == 2


class Slow(pl.Callback):
    """A clock of each rank's own, on which its steps take so many seconds."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.now_s = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self.now_s += self.step_s


def save_by_pace(context: RankContext, folder: str, parallel: str) -> tuple[list[int], SaveInterval | None]:
    """Steps take 1 s on rank 0 and 3 s on rank 1."""
    keep = AsyncShardedCheckpoint(folder, every="auto", mtbf_h=0.01, save_top_k=-1)
    slow = Slow(1.0 + 2.0 * context.rank)
    keep._pace._clock = lambda: slow.now_s  # type: ignore[union-attr]  # every="auto" makes it
    strategy = DDPStrategy() if parallel == "lightning" else strategy_of(parallel=parallel)
    trainer = _trainer(context, strategy, keep, 40)
    trainer.callbacks.insert(0, slow)
    saved: list[int] = []
    save = keep._save_checkpoint

    def note(trainer: pl.Trainer, filepath: str) -> None:
        saved.append(trainer.global_step)
        save(trainer, filepath)

    keep._save_checkpoint = note  # type: ignore[method-assign]
    trainer.fit(StageLearner(CASE))
    return saved, keep._pace.interval  # type: ignore[union-attr]


@pytest.mark.parametrize("parallel", ["lightning", "zero2"])
def test_ranks_that_measure_other_times_save_at_the_same_steps(ranks: RankPool, tmp_path: Path, parallel: str) -> None:
    (steps, interval), (other_steps, other_interval) = ranks.run(
        save_by_pace, world_size=2, args=(str(tmp_path), parallel)
    )
    assert steps == other_steps
    assert interval is not None
    assert interval == other_interval
    assert 2.0 < interval.measured.step_s <= 3.0  # rank 1's, less the seconds that the save held it
    assert steps[:2] == [FIRST_STEPS, 2 * FIRST_STEPS]
    assert len(steps) > 2
    assert len(list(tmp_path.iterdir())) == len(steps)


def save_once(context: RankContext, folder: str) -> dict[str, torch.Tensor]:
    module = StageLearner(CASE)
    keep = AsyncShardedCheckpoint(folder, filename="once")
    _trainer(context, strategy_of(parallel={"mode": "zero3"}), keep, 1).fit(module)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def test_a_module_is_loaded_without_ranks(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(save_once, world_size=2, args=(str(tmp_path),))[0]
    module = load_from_checkpoint(StageLearner, tmp_path / "once.ckpt", case=CASE)
    assert module.state_dict().keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(module.state_dict()[name], value), name


def test_what_it_does_not_go_with_is_refused() -> None:
    with pytest.raises(CombinationError, match="write sharded or async_sharded"):
        AsyncShardedCheckpoint(checkpoint="full")
    callback = AsyncShardedCheckpoint()
    trainer = pl.Trainer(accelerator="cpu", devices=1, callbacks=[callback], logger=False)
    with pytest.raises(
        CombinationError, match="AsyncShardedCheckpoint with SingleDeviceStrategy: write strategy='ddp'"
    ):
        callback.setup(trainer, StageLearner(CASE), "fit")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": "auto"}, "mtbf_h=None .* write the mean time between failures"),
        ({"every": "auto", "mtbf_h": 0.0}, "mtbf_h=0.0"),
        ({"every": "auto", "mtbf_h": 9.0, "restart_s": -1.0}, "restart_s=-1"),
        ({"every": "auto", "mtbf_h": 9.0, "every_n_train_steps": 5}, "every='auto' with every_n_train_steps"),
        ({"every": "auto", "mtbf_h": 9.0, "train_time_interval": timedelta(minutes=1)}, "with train_time_interval"),
        ({"every": "auto", "mtbf_h": 9.0, "every_n_epochs": 1, "monitor": "x"}, "with every_n_epochs and monitor"),
        ({"every": "often"}, "write every='auto', or every_n_train_steps"),
        ({"mtbf_h": 9.0}, "for every='auto': add it"),
    ],
)
def test_intervals_that_do_not_go_together_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CombinationError, match=message):
        AsyncShardedCheckpoint(**arguments)
