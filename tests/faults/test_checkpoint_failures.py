"""Ranks that die, raise or save alone while checkpoints are written: all end, and the last whole one is there."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_dist.checkpoint import catalog
from lightning_dist.checkpoint.local_disk import LocalFolder
from lightning_dist.checkpoint.manifest import MARKER_FILE
from lightning_dist.checkpoint.storage import open_folder
from lightning_dist.checkpoint.whole import read_tensor
from tests.distributed.lightning_runs import strategy_of, trainer_on_pool
from tests.distributed.pipeline_runs import StageCase, StageLearner
from tests.distributed.test_checkpoint_use import SaveEachStep, writing
from tests.faults.fits import ending_of_fit
from tests.support.faults import InjectedError
from tests.support.ranks import Died, RankPool
from tests.support.tasks import RankContext

TIMEOUT_S = 3.0
PATIENT_S = 120.0
"""Longer than a call may take: with it, ranks that are told of a failure only when their wait is over fail the test."""


def _trainer(
    context: RankContext, *callbacks: pl.Callback, parallel: str, timeout_s: float, **arguments: Any
) -> pl.Trainer:
    strategy = strategy_of(parallel=parallel, checkpoint="async_sharded", sync={"timeout_s": timeout_s})
    settings = {"max_epochs": 1, "limit_val_batches": 0, **arguments}
    return trainer_on_pool(context, strategy, callbacks=list(callbacks), **settings)


def whole_in(folder: Path) -> list[str]:
    """Names of the checkpoints that are whole, by name."""
    return sorted(entry.name for entry in catalog.survey(open_folder(folder), full=True) if entry.problem is None)


def assert_of_step(folder: Path, step: int, value: float | None = None) -> None:
    """All weights are the number of the step, or another one."""
    checkpoint = catalog.open_checkpoint(open_folder(folder / f"{step}.ckpt"), full=True)
    weights = [name for name in checkpoint.manifest.tensors if name.startswith("model/")]
    assert weights
    for name in weights:
        assert bool((read_tensor(checkpoint, name) == (step if value is None else value)).all()), name


# -- a rank that is killed ---------------------------------------------------------------------------------------------


def train_until_killed(context: RankContext, folder: str, parallel: str, killed: int, file: str) -> dict[str, Any]:
    """One rank is killed before it writes a file of the second checkpoint."""

    def kill(place: LocalFolder, name: str) -> None:
        if context.rank == killed and place.url.endswith("/2.ckpt") and name.startswith(file):
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = _trainer(context, SaveEachStep(Path(folder)), parallel=parallel, timeout_s=PATIENT_S)
    with writing(kill):
        return ending_of_fit(trainer, StageLearner(StageCase(optimizer="adamw")))


@pytest.mark.parametrize(
    ("parallel", "killed", "file"), [("ddp", 1, "rank00001"), ("zero2", 0, "rank00000"), ("zero2", 0, MARKER_FILE)]
)
def test_a_rank_killed_in_a_write_is_named_and_the_checkpoint_before_stays(
    ranks: RankPool, tmp_path: Path, parallel: str, killed: int, file: str
) -> None:
    ended = ranks.run(
        train_until_killed,
        layout={"a": [0], "b": [1]},
        args=(str(tmp_path), parallel, killed, file),
        init_group=False,
        may_die=[killed],
    )
    assert isinstance(ended[killed], Died)
    other = ended[1 - killed]
    assert other["is_ours"], other
    assert f"rank {killed} (host {'ab'[killed]})" in other["text"], other["text"]
    assert whole_in(tmp_path) == ["1.ckpt"]
    assert_of_step(tmp_path, 1)


# -- storage that refuses from some time on ----------------------------------------------------------------------------


def lose_permission(context: RankContext, folder: str, parallel: str, file: str) -> tuple[dict[str, Any], list[int]]:
    """Rank 1 may write nothing any more, or rank 0 no marker, from the second checkpoint on; then all go on."""

    def refuse(place: LocalFolder, name: str) -> None:
        if place.url.endswith(("/2.ckpt", "/3.ckpt")) and name.startswith(file):
            raise PermissionError(errno.EACCES, "Permission denied", f"{place.url}/{name}")

    trainer = _trainer(context, SaveEachStep(Path(folder)), parallel=parallel, timeout_s=PATIENT_S)
    with writing(refuse):
        ended = ending_of_fit(trainer, StageLearner(StageCase(optimizer="adamw")))
    return ended, [trainer.global_step]


@pytest.mark.parametrize(
    ("parallel", "file"), [("zero2", "rank00001"), pytest.param("ddp", MARKER_FILE, marks=pytest.mark.sweep)]
)
def test_permission_lost_in_the_middle_ends_all_ranks(
    ranks: RankPool, tmp_path: Path, parallel: str, file: str
) -> None:
    for ended, (step,) in ranks.run(
        lose_permission, world_size=2, args=(str(tmp_path), parallel, file), init_group=False, fresh=True
    ):
        assert ended["text"].startswith(f"CheckpointError: saving {tmp_path}/2.ckpt"), ended
        assert f"rank {int(file == 'rank00001')}" in ended["text"], ended["text"]
        assert "Permission denied" in ended["text"], ended["text"]
        assert step < 4
    assert whole_in(tmp_path) == ["1.ckpt"]
    assert_of_step(tmp_path, 1)
    for step in ranks.run(go_on_from, world_size=2, args=(str(tmp_path / "1.ckpt"), parallel), fresh=True):
        assert step == 4


def go_on_from(context: RankContext, path: str, parallel: str) -> int:
    trainer = _trainer(context, parallel=parallel, timeout_s=PATIENT_S)
    trainer.fit(StageLearner(StageCase(optimizer="adamw")), ckpt_path=path)
    return trainer.global_step


# -- an error of the user's --------------------------------------------------------------------------------------------


class RaiseInStep(StageLearner):
    """Raises in the third batch, on one rank or on all, while a checkpoint is being written."""

    def __init__(self, raising: tuple[int, ...]) -> None:
        super().__init__(StageCase(optimizer="adamw"))
        self.raising = raising

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2 and self.global_rank in self.raising:
            raise InjectedError("the user's own")
        return super().training_step(batch, batch_idx)


def raise_and_fit_again(context: RankContext, folder: str, parallel: str) -> dict[str, Any]:
    """A fit that raises on all ranks while its second checkpoint is being written, and another into the same folder."""
    is_over = threading.Event()

    def wait(place: LocalFolder, name: str) -> None:
        if place.url.endswith("/2.ckpt"):
            is_over.wait(1.0)  # the first fit has raised by then, unless it waits for this

    def trainer() -> pl.Trainer:
        return _trainer(context, SaveEachStep(Path(folder)), parallel=parallel, timeout_s=20.0)

    with writing(wait):
        with pytest.raises(InjectedError, match="the user's own"):
            trainer().fit(RaiseInStep((0, 1)))
        after_the_first = whole_in(Path(folder))
        is_over.set()
        second = trainer()
        second.fit(StageLearner(StageCase(optimizer="adamw")))
    left = [each.name for each in threading.enumerate() if each.name.startswith("hierdist-checkpoint")]
    return {"after_the_first": after_the_first, "step": second.global_step, "threads": left}


@pytest.mark.parametrize("parallel", ["ddp", "zero2"])
def test_a_fit_after_one_that_raised_saves_on_its_own(ranks: RankPool, tmp_path: Path, parallel: str) -> None:
    for ended in ranks.run(raise_and_fit_again, world_size=2, args=(str(tmp_path), parallel), fresh=True):
        assert ended["after_the_first"] in (["1.ckpt"], ["1.ckpt", "2.ckpt"])
        assert ended["step"] == 4
        assert ended["threads"] == []
    assert whole_in(tmp_path) == [f"{step}.ckpt" for step in (1, 2, 3, 4)]
    for step in (1, 2, 3, 4):
        assert_of_step(tmp_path, step)


class SaveOther(SaveEachStep):
    """All weights are a hundred more than the number of the step."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.fill_(100 + trainer.global_step)
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def give_up_and_fit_again(context: RankContext, folder: str, file: str) -> list[str]:
    """A fit raises while its second checkpoint is held up before a file, for longer than it waits for it. Another one
    saves under the same names meanwhile, and the first one's write goes on when that has ended.
    """
    is_over, is_first = threading.Event(), [True]

    def hold(place: LocalFolder, name: str) -> None:
        if is_first[0] and place.url.endswith("/2.ckpt") and name.startswith(file):
            is_over.wait(60)

    with writing(hold):
        checkpoint = {"mode": "async_sharded", "timeout_s": TIMEOUT_S}
        strategy = strategy_of(parallel="zero2", checkpoint=checkpoint)
        first = trainer_on_pool(context, strategy, callbacks=[SaveEachStep(Path(folder))], limit_val_batches=0)
        with (
            pytest.raises(InjectedError, match="the user's own"),
            pytest.warns(UserWarning, match="the last checkpoint was not written: .*(TimeoutError|Timed out)"),
        ):
            first.fit(RaiseInStep((0, 1)))
        is_first[0] = False
        given_up = [each for each in threading.enumerate() if each.name.startswith("hierdist-checkpoint")]
        second = _trainer(context, SaveOther(Path(folder)), parallel="zero2", timeout_s=20.0)
        second.fit(StageLearner(StageCase(optimizer="adamw")))
        is_over.set()
        for thread in given_up:
            thread.join(30)
    return [f"{thread.name} lives: {thread.is_alive()}" for thread in given_up]


@pytest.mark.parametrize("file", [pytest.param("rank", marks=pytest.mark.sweep), "manifest", MARKER_FILE])
def test_a_write_that_was_given_up_harms_no_later_one(ranks: RankPool, tmp_path: Path, file: str) -> None:
    threads = ranks.run(give_up_and_fit_again, world_size=2, args=(str(tmp_path), file), fresh=True)
    assert threads[0] == ["hierdist-checkpoint lives: False"]
    assert all(said.endswith("False") for said in threads[1])  # where only rank 0 was held up, it may have ended before
    assert whole_in(tmp_path) == [f"{step}.ckpt" for step in (1, 2, 3, 4)]
    for step in (1, 2, 3, 4):
        assert_of_step(tmp_path, step, 100 + step)


def raise_on_one(context: RankContext, folder: str, parallel: str) -> dict[str, Any]:
    is_over = threading.Event()

    def wait(place: LocalFolder, name: str) -> None:
        if place.url.endswith("/2.ckpt"):
            is_over.wait(1.0)

    trainer = _trainer(context, SaveEachStep(Path(folder)), parallel=parallel, timeout_s=PATIENT_S)
    with writing(wait):
        return ending_of_fit(trainer, RaiseInStep((1,)))


@pytest.mark.parametrize("parallel", ["ddp", "zero2"])
def test_an_error_on_one_rank_while_a_checkpoint_is_written_ends_all(
    ranks: RankPool, tmp_path: Path, parallel: str
) -> None:
    first, second = ranks.run(
        raise_on_one, layout={"a": [0, 1]}, args=(str(tmp_path), parallel), init_group=False, fresh=True
    )
    assert second["text"] == "InjectedError: the user's own"
    assert first["is_ours"], first
    assert "rank 1 (host a)" in first["text"]
    assert "the user's own" in first["text"]
    whole = whole_in(tmp_path)
    assert whole in (["1.ckpt"], ["1.ckpt", "2.ckpt"])
    for name in whole:
        assert_of_step(tmp_path, int(name.removesuffix(".ckpt")))


# -- one rank alone ----------------------------------------------------------------------------------------------------


class SaveAlone(pl.Callback):
    """One rank saves after a batch; the other goes on."""

    def __init__(self, folder: Path, rank: int, batch: int) -> None:
        self.folder = folder
        self.rank = rank
        self.batch = batch

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (trainer.global_rank, batch_idx) == (self.rank, self.batch):
            trainer.save_checkpoint(self.folder / "alone.ckpt")


def save_alone(context: RankContext, folder: str, parallel: str, rank: int, batch: int) -> dict[str, Any]:
    trainer = _trainer(context, SaveAlone(Path(folder), rank, batch), parallel=parallel, timeout_s=TIMEOUT_S)
    return ending_of_fit(trainer, StageLearner(StageCase(optimizer="adamw")))


@pytest.mark.parametrize(("parallel", "rank", "batch"), [("ddp", 0, 1), ("zero2", 1, 1), ("zero2", 0, 3)])
def test_a_save_on_one_rank_only_ends_in_an_error_that_says_who_did_not_come(
    ranks: RankPool, tmp_path: Path, parallel: str, rank: int, batch: int
) -> None:
    """The last batch too, after which the other rank ends its fit."""
    ended = ranks.run(
        save_alone,
        layout={"a": [0], "b": [1]},
        args=(str(tmp_path), parallel, rank, batch),
        init_group=False,
        fresh=True,
    )
    assert ended[rank]["is_ours"], ended[rank]
    assert "Trainer.save_checkpoint" in ended[rank]["text"], ended[rank]["text"]
    assert f"rank {1 - rank} (host {'ab'[1 - rank]})" in ended[rank]["text"], ended[rank]["text"]
    assert ended[1 - rank]["is_ours"], ended[1 - rank]
    assert whole_in(tmp_path) == []
