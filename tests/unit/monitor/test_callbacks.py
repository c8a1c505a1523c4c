"""The callbacks of a monitor: what goes wrong in them is said, and training goes on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_dist import ClusterMonitor, MonitorOutputs, StepTimeline
from lightning_dist.capture import TrainerCapture
from lightning_dist.monitor import rank_file
from lightning_dist.monitor.alarms import Alarms
from lightning_dist.monitor.record import Sample
from tests.distributed.lightning_runs import OddModule, loader_of, make_batches, sgd


class Kept(CSVLogger):
    """Keeps what is logged as ``monitor/...``."""

    def __init__(self, folder: Path, error: Exception | None = None) -> None:
        super().__init__(folder)
        self.error = error
        self.steps: list[int | None] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if any(name.startswith("monitor/") for name in metrics):
            self.steps.append(step)
            if self.error is not None:
                raise self.error


def fitted(folder: Path, *callbacks: pl.Callback, **others: Any) -> pl.Trainer:
    given: dict[str, Any] = {"logger": False, "max_epochs": 1, **others}
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
    )
    trainer.fit(OddModule(sgd), loader_of(make_batches(1, 12)[0]), loader_of(make_batches(1, 1)[0]))
    return trainer


def test_training_goes_on_where_nothing_can_be_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: TrainerCapture) -> None:
        raise RuntimeError("as planned")

    monkeypatch.setattr(TrainerCapture, "_open", failing)
    callbacks = StepTimeline(), ClusterMonitor(), MonitorOutputs(history=None, report=False, prometheus_port=1)
    with pytest.warns(UserWarning, match="training goes on: RuntimeError: as planned") as said:
        trainer = fitted(tmp_path, *callbacks)
    assert trainer.global_step == 12
    assert sum("as planned" in str(each.message) for each in said) == 3


def test_means_are_logged_once_a_step_under_accumulation(tmp_path: Path) -> None:
    logger = Kept(tmp_path)
    outputs = MonitorOutputs(history=None, report=False)

    class Sampling(pl.Callback):
        def on_train_batch_start(self, *arguments: Any) -> None:
            outputs._take_sample(Sample("memory", 0, 0, 1.0))

    fitted(tmp_path, StepTimeline(), Sampling(), outputs, logger=logger, accumulate_grad_batches=4, log_every_n_steps=1)
    assert logger.steps == [0, 1, 2]


def test_a_logger_that_refuses_them_gets_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Alarms, "take", lambda alarms, sample: None)  # this machine's network may lose segments
    logger = Kept(tmp_path, ValueError("no such metric"))
    outputs = MonitorOutputs(history=None, report=False)
    with pytest.warns(UserWarning, match="no such metric"):
        trainer = fitted(
            tmp_path,
            StepTimeline(),
            ClusterMonitor(interval_s=0.01),
            outputs,
            logger=logger,
            max_epochs=30,
            log_every_n_steps=1,
        )
    assert trainer.global_step == 360
    assert len(logger.steps) == 1


def test_records_that_are_lost_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_file, "_MOST_LINES", 4)
    with pytest.warns(UserWarning, match="records are missing in .*steps-00000.jsonl: the disk stood still"):
        fitted(tmp_path, StepTimeline())


def test_a_timeline_that_nobody_else_reads_says_how_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO):
        fitted(tmp_path, StepTimeline())
        assert "hierdist: where the steps' time went says: hierdist report monitor" in caplog.text
        caplog.clear()
        fitted(tmp_path, StepTimeline(), MonitorOutputs(history=None, report=False))
        assert "hierdist: " in caplog.text
        assert "hierdist report" not in caplog.text
