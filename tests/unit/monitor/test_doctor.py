"""The doctor inside a script: when training ends, and that nothing of the script's is written over."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.loggers.logger import DummyLogger

import hierdist_doctor_hook
from lightning_dist import ClusterMonitor, MonitorOutputs, StepTimeline
from lightning_dist.callbacks import doctor
from lightning_dist.callbacks.attendance import meet
from lightning_dist.callbacks.doctor import DoctorStop
from lightning_dist.cli import main
from lightning_dist.errors import LaunchError
from lightning_dist.monitor.doctor_notes import DoctorNote, examined, leave, notes_of
from lightning_dist.monitor.doctor_order import VARIABLE, DoctorOrder
from lightning_dist.monitor.doctor_scratch import scratch_for
from lightning_dist.monitor.rank_file import rank_path
from lightning_dist.monitor.run_files import FACTS, read_run
from tests.distributed.lightning_runs import OddModule, loader_of, make_batches, sgd


@pytest.fixture
def order(tmp_path: Path) -> DoctorOrder:
    return DoctorOrder(str(tmp_path / "doctor"), steps=4, minutes=10)


@pytest.fixture
def patient(order: DoctorOrder, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[pl.Trainer]]:
    """The Trainer's class as it is in a process of a doctor; as before afterwards."""
    before = pl.Trainer.fit, pl.Trainer.save_checkpoint
    monkeypatch.setenv(VARIABLE, order.to_text())
    yield pl.Trainer
    pl.Trainer.fit, pl.Trainer.save_checkpoint = before  # type: ignore[method-assign]
    if hasattr(pl.Trainer, doctor._WRAPPED):
        delattr(pl.Trainer, doctor._WRAPPED)


class Remote(Logger):
    """Reports to a server."""

    name = version = None

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        raise AssertionError("nothing is reported of a trial")

    def log_hyperparams(self, *arguments: Any, **others: Any) -> None:
        raise AssertionError("nothing is reported of a trial")


class Logging(OddModule):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def trainer(folder: Path, *callbacks: pl.Callback, **others: Any) -> pl.Trainer:
    given: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "max_epochs": 2, **others}
    return pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **given,
    )


def loader(count: int = 10) -> Any:
    return loader_of(make_batches(1, count)[0])


def test_without_the_variable_nothing_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    before = pl.Trainer.fit
    trainer(tmp_path)
    assert hierdist_doctor_hook.callbacks() == hierdist_doctor_hook.callbacks_of_other_package() == []
    assert pl.Trainer.fit is before


def test_the_variable_is_the_orders(order: DoctorOrder) -> None:
    assert hierdist_doctor_hook.VARIABLE == VARIABLE
    assert DoctorOrder.from_text(order.to_text()) == order


def test_a_fit_ends_after_its_steps_and_the_script_with_it(
    patient: type[pl.Trainer], order: DoctorOrder, tmp_path: Path
) -> None:
    folder = tmp_path / "script"
    folder.mkdir()
    (folder / "last.ckpt").write_text("precious")
    saves = ModelCheckpoint(folder, save_last=True, every_n_train_steps=1)
    ours = trainer(
        folder,
        saves,
        enable_checkpointing=True,
        logger=[CSVLogger(folder), Remote()],
        min_epochs=2,
        val_check_interval=1,
    )
    with pytest.raises(SystemExit) as ended:
        ours.fit(Logging(sgd), loader(), loader(2))
    assert ended.value.code == 0
    assert ours.global_step == order.steps
    ours.save_checkpoint(folder / "last.ckpt")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"last.ckpt": "precious"}
    written = {path.name for path in order.scratch.rglob("*") if path.is_file()}
    assert {"metrics.csv", "last.ckpt"} <= written
    record = read_run(order.record)
    assert len(record.ranks[0].steps) == order.steps
    assert record.ranks[0].header.facts["dataset_length"] == 10


def test_callbacks_of_the_script_are_not_doubled(patient: type[pl.Trainer], order: DoctorOrder, tmp_path: Path) -> None:
    folder = tmp_path / "script"
    own = StepTimeline(folder), ClusterMonitor(folder, interval_s=0.05)
    ours = trainer(folder, *own, MonitorOutputs(history=tmp_path / "history"))
    with pytest.raises(SystemExit):
        ours.fit(OddModule(sgd), loader(), loader(1))
    kinds = [type(each) for each in ours.callbacks]  # type: ignore[attr-defined]
    assert kinds.count(StepTimeline) == kinds.count(ClusterMonitor) == kinds.count(DoctorStop) == 1
    assert MonitorOutputs not in kinds
    assert own[0].folder == order.record
    assert not folder.exists()
    assert not (tmp_path / "history").exists()


def test_a_script_that_uses_its_logger_finds_one(patient: type[pl.Trainer], tmp_path: Path) -> None:
    ours = trainer(tmp_path, logger=Remote())
    with pytest.raises(SystemExit):
        ours.fit(Logging(sgd), loader(), loader(1))
    assert isinstance(ours.logger, DummyLogger)


def test_a_fit_that_fails_fails(patient: type[pl.Trainer], tmp_path: Path) -> None:
    class Failing(OddModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise ValueError("as planned")

    with pytest.raises(ValueError, match="as planned"):
        trainer(tmp_path).fit(Failing(sgd), loader(), loader(1))


def test_accumulated_batches_are_one_step(order: DoctorOrder, tmp_path: Path) -> None:
    stop = DoctorStop(order)
    ours = trainer(tmp_path, stop, accumulate_grad_batches=3)
    ours.fit(OddModule(sgd), loader(30), loader(1))
    assert (ours.global_step, stop.steps) == (4, 4)


def test_time_ends_training_too(order: DoctorOrder, tmp_path: Path) -> None:
    """A clock that a step moves by a minute: of eleven minutes nine have passed after nine steps."""
    stop = DoctorStop(DoctorOrder(order.folder, steps=100, minutes=9), clock_s=iter(range(0, 6000, 60)).__next__)
    ours = trainer(tmp_path, stop)
    ours.fit(OddModule(sgd), loader(20), loader(1))
    assert stop.steps == 9


def test_time_is_asked_after_seconds_not_after_each_step(order: DoctorOrder, tmp_path: Path) -> None:
    """At 0.1 s a step: after the first, then every 20."""
    asked: list[int] = []
    stop = DoctorStop(DoctorOrder(order.folder, steps=50, minutes=10), clock_s=lambda: stop.steps * 0.1)
    ours = trainer(tmp_path, stop, max_epochs=10)
    broadcast = ours.strategy.broadcast
    ours.strategy.broadcast = lambda more: asked.append(stop.steps) or broadcast(more)  # type: ignore[method-assign, assignment]
    ours.fit(OddModule(sgd), loader(20), loader(1))
    assert [step for step in asked if step] == [1, 21, 41]
    assert stop.steps == 50


@pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric val_loss:RuntimeWarning")
def test_what_looks_at_the_validation_that_is_left_out_does_not_end_the_script(
    patient: type[pl.Trainer], order: DoctorOrder, tmp_path: Path
) -> None:
    class Watching(OddModule):
        def configure_optimizers(self) -> Any:
            optimizer = sgd(list(self.parameters()))
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    ours = trainer(tmp_path, EarlyStopping("val_loss"))
    with pytest.raises(SystemExit):
        ours.fit(Watching(sgd), loader(order.steps), loader(1))
    assert ours.global_step == order.steps


def test_time_ends_a_training_whose_steps_lightning_does_not_count(order: DoctorOrder, tmp_path: Path) -> None:
    class Own(OddModule):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers(use_pl_optimizer=False)
            assert isinstance(optimizer, torch.optim.Optimizer)
            optimizer.step()

    stop = DoctorStop(DoctorOrder(order.folder, steps=100, minutes=9), clock_s=iter(range(0, 6000, 60)).__next__)
    ours = trainer(tmp_path, stop)
    module = Own(sgd)
    module.automatic_optimization = False
    ours.fit(module, loader(20), loader(1))
    assert (stop.steps, ours.fit_loop.total_batch_idx + 1) == (0, 9)


def test_a_callback_that_only_says_where_it_writes_is_left_alone(patient: type[pl.Trainer], tmp_path: Path) -> None:
    class Says(pl.Callback):
        dirpath = property(lambda self: "elsewhere")

    with pytest.raises(SystemExit):
        trainer(tmp_path, Says()).fit(OddModule(sgd), loader(), loader(1))


def test_an_earlier_examination_is_not_taken_for_this_one(
    patient: type[pl.Trainer], order: DoctorOrder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        trainer(tmp_path).fit(OddModule(sgd), loader(), loader(1))
    assert [note.has_steps for note in notes_of(order)] == [True]
    os.environ.pop(VARIABLE)
    assert main(["doctor", "-o", order.folder, "--", "true"]) == 2
    assert "no step was recorded: true trained nothing" in capfd.readouterr().err


def test_notes_tell_which_fit_was_examined_and_whose_ranks_are_here(order: DoctorOrder, tmp_path: Path) -> None:
    assert examined([]) is None

    def note(rank: int, run: str, *, steps: bool) -> DoctorNote:
        folder = tmp_path / run
        folder.mkdir(exist_ok=True)
        if steps:
            rank_path(folder, "steps", rank).write_text("{}\n")
        return DoctorNote(rank, 4, str(folder), str(order.scratch))

    for each in (note(0, "first", steps=True), note(1, "second", steps=True), note(0, "second", steps=True)):
        leave(order, each)
    leave(order, note(0, "third", steps=False))
    left = notes_of(order)
    assert [(each.rank, Path(each.record).name) for each in left] == [
        (0, "first"),
        (1, "second"),
        (0, "second"),
        (0, "third"),
    ]
    fit = examined(left)
    assert fit is not None
    assert (fit.record.name, fit.ranks, fit.has_rank_0, fit.has_all_ranks) == ("second", (0, 1), True, False)


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_host_without_rank_0_says_who_says_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], is_shared: bool
) -> None:
    """Its ranks wrote where rank 0 said; whether rank 0 did, too, is seen by its file."""
    monkeypatch.chdir(tmp_path)
    there = DoctorOrder(str(tmp_path / "theirs"), steps=4, minutes=10)
    there.record.mkdir(parents=True)
    there.scratch.mkdir(parents=True)
    rank_path(there.record, "steps", 3).write_text("{}\n")
    if is_shared:
        (there.record / FACTS).write_text("{}")
    note = DoctorNote(3, 4, str(there.record), str(there.scratch))
    script = f"""
import os
from lightning_dist.monitor.doctor_notes import DoctorNote, leave
from lightning_dist.monitor.doctor_order import DoctorOrder
leave(DoctorOrder.from_text(os.environ[{VARIABLE!r}]), {note!r})
"""
    assert main(["doctor", "--", sys.executable, "-c", script]) == 0
    said = capfd.readouterr().out
    assert "rank 3 of 4 trained here" in said
    assert (f"writes {tmp_path}/theirs/report.html" in said) == is_shared
    assert (f"hierdist report {there.record} COPY" in said) != is_shared
    assert there.scratch.exists() == is_shared, "of rank 0's host it is that host's doctor who removes it"
    assert there.record.exists()
    assert list((tmp_path / "doctor").iterdir()) == [], "an empty folder is not left"


def test_ranks_that_no_doctor_examines_are_named() -> None:
    store = dist.HashStore()
    with pytest.raises(LaunchError, match=r"examines rank 1, .* nothing was heard of 2 of 3 ranks \(0, 2\); run it on"):
        meet(store, 1, 3, wait_s=0.01)
    with pytest.raises(LaunchError, match=r"nothing was heard of 1 of 3 ranks \(2\)"):
        meet(store, 0, 3, wait_s=0.01)
    meet(store, 2, 3)
    meet(store, 1, 3)


def test_a_hosts_scratch_is_there_until_the_last_host_is_done(
    order: DoctorOrder, capfd: pytest.CaptureFixture[str]
) -> None:
    """A host whose script ends at once takes nothing from one whose script goes on."""
    with scratch_for(order):
        checkpoint = order.scratch / "checkpoints-0" / "shard-1"
        checkpoint.parent.mkdir()
        checkpoint.touch()
        assert main(["doctor", "-o", order.folder, "--", "true"]) == 2
        assert checkpoint.exists()
    assert not order.scratch.exists()
    with scratch_for(order), scratch_for(order):
        shutil.rmtree(order.scratch)  # as two that leave at once do
    assert not order.scratch.exists()
    with scratch_for(order):
        shutil.rmtree(order.scratch)  # as one that leaves while this one comes
        checkpoint.parent.mkdir(parents=True)
    assert not order.scratch.exists()
    assert list(Path(order.folder).iterdir()) == []


def test_a_folder_of_the_users_is_not_removed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    precious = tmp_path / "scratch" / "precious"
    precious.mkdir(parents=True)
    assert main(["doctor", "-o", str(tmp_path), "--", "true"]) == 2
    assert precious.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["doctor"], "write it after --"),
        (["doctor", "--steps", "0", "--", "true"], "--steps must be at least 1"),
        (["doctor", "--minutes", "0", "--", "true"], "--minutes must be a positive number"),
        (["doctor", "--output", "s3://bucket/a", "--", "true"], "--output=s3:/bucket/a is a URL"),
        (["doctor", "--", "no-such-command"], "no-such-command cannot be started"),
        (["doctor", "--", "true"], "no step was recorded: true trained nothing"),
    ],
)
def test_what_cannot_be_examined_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def test_a_patient_is_not_examined_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], order: DoctorOrder
) -> None:
    monkeypatch.setenv(VARIABLE, order.to_text())
    assert main(["doctor", "--", "true"]) == 2
    assert "around the whole command" in capsys.readouterr().err


def test_the_status_of_a_command_that_fails_is_the_doctors(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "-o", str(tmp_path / "d"), "--", "sh", "-c", "echo seen; exit 7"]) == 7
    said = capfd.readouterr()
    assert "seen" in said.out
    assert "ended with status 7" in said.err
    assert main(["doctor", "-o", str(tmp_path / "d"), "--", "sh", "-c", "kill -9 $$"]) == 137
    assert "status 137 (Killed)" in capfd.readouterr().err
    assert main(["doctor", "-o", str(tmp_path / "d"), "--", "sh", "-c", "exit 255"]) == 255
    assert "ended with status 255;" in capfd.readouterr().err
