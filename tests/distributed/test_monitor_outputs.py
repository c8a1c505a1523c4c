"""Where a monitored run's figures go: loggers, Prometheus, the report, the history; under Lightning's ddp and ours."""

from __future__ import annotations

import csv
import os
import time
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy

from lightning_dist import MonitorConfig, MonitorOutputs, StepTimeline, incidents, monitor_callbacks
from lightning_dist.errors import UnknownOptionError
from lightning_dist.monitor.history.folder import read_history
from lightning_dist.monitor.run_files import read_run
from lightning_dist.monitor.whole_run import read_whole
from tests.distributed.lightning_runs import (
    OddModule,
    loader_of,
    make_batches,
    sgd,
    strategy_of,
    trainer_on_pool,
)
from tests.support.processes import free_port
from tests.support.ranks import RankPool
from tests.support.rounds import KILLED
from tests.support.scraping import scraped
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

STEPS = 30


class Scrape(pl.Callback):
    """Asks this rank's endpoint in the middle of the run, after a step that is long enough for all to be told."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.figures: dict[str, float] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, *arguments: Any) -> None:
        if trainer.global_step == STEPS // 2 - 1:
            time.sleep(0.5)
        if trainer.global_step == STEPS // 2:
            self.figures = scraped(f"http://127.0.0.1:{self.port + trainer.local_rank}/metrics")


def watched(context: RankContext, kind: str, folder: str, port: int) -> dict[str, float]:
    strategy = DDPStrategy() if kind == "ddp" else strategy_of(parallel=kind)
    config = MonitorConfig(
        folder=f"{folder}/monitor", interval_s=0.05, history=f"{folder}/history", prometheus_port=port
    )
    scrape = Scrape(port)
    trainer = trainer_on_pool(
        context,
        strategy,
        callbacks=[*monitor_callbacks(config), scrape],
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=5,
    )
    trainer.fit(OddModule(sgd), loader_of(make_batches(context.world_size, STEPS)[context.rank]))
    outputs = next(each for each in trainer.callbacks if isinstance(each, MonitorOutputs))  # type: ignore[attr-defined]
    assert (outputs.outcome is not None) == (context.rank == 0)
    return scrape.figures


@pytest.mark.parametrize("kind", sampled({kind: (kind,) for kind in ("ddp", "zero2", "zero3")}, always=["ddp"]))
def test_a_run_leaves_its_figures_everywhere(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    port = free_port()
    scraped_of = ranks.run(watched, world_size=2, args=(kind, str(tmp_path), port))
    for rank, figures in enumerate(scraped_of):
        steps = {name: value for name, value in figures.items() if name.startswith("hierdist_steps_total")}
        assert list(steps.values()) == [STEPS // 2], f"rank {rank} served {sorted(figures)}"
        assert f'rank="{rank}"' in next(iter(steps))

    record = read_run(tmp_path / "monitor")
    assert {rank: len(each.steps) for rank, each in record.ranks.items()} == {0: STEPS, 1: STEPS}
    assert record.ranks[1].header.facts["cpu_cores"] >= 1
    (kept,) = read_history(tmp_path / "history").runs
    assert kept.run_id == record.facts.run_id
    assert kept.steps == STEPS
    assert kept.metrics["step"].count == STEPS - 3
    assert kept.verdict
    assert "<html" in (tmp_path / "monitor" / "report.html").read_text()

    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["monitor/step"]]
    assert 1 <= len(rows) <= STEPS // 5  # steps are told in bursts, and these are short
    assert all(float(row["monitor/step"]) > 0 for row in rows)
    assert all(float(row["monitor/forward"]) > 0 for row in rows)


def two_starts(context: RankContext, folder: str) -> None:
    """As a launcher starts ranks, and again after a failure."""
    for start in ("1", "2"):
        environment = {"HIERDIST_RUN": "run", "HIERDIST_ROUND": start, "HIERDIST_RECORD": f"{folder}/record"}
        with patch.dict(os.environ, environment):
            outputs = MonitorOutputs(history=f"{folder}/history")
            trainer = trainer_on_pool(
                context, DDPStrategy(), callbacks=[StepTimeline(f"{folder}/monitor"), outputs], default_root_dir=folder
            )
            trainer.fit(OddModule(sgd), loader_of(make_batches(context.world_size, 3)[context.rank]))


def test_starts_of_one_run_are_joined_with_their_incidents(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / incidents.FILE).write_text(incidents.to_line(KILLED))
    ranks.run(two_starts, world_size=1, args=(str(tmp_path),))
    whole = read_whole(tmp_path / "monitor")
    assert [(record.facts.run, record.facts.round) for record in whole.rounds] == [("run", 1), ("run", 2)]
    (kept,) = read_history(tmp_path / "history").runs
    assert (kept.rounds, kept.incidents, kept.steps, kept.steps_lost) == (2, 1, 3, 3)
    page = (tmp_path / "monitor-1" / "report.html").read_text()
    assert "a rank was killed" in page


def taken(context: RankContext, folder: str, port: int) -> list[str]:
    import socket

    with socket.create_server(("127.0.0.1", port + context.rank)), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = MonitorOutputs(history=None, report=False, prometheus_port=port)
        trainer = trainer_on_pool(context, DDPStrategy(), callbacks=[StepTimeline(folder), outputs])
        trainer.fit(OddModule(sgd), loader_of(make_batches(context.world_size, 3)[context.rank]))
        assert trainer.global_step == 3
    return [str(warning.message) for warning in caught]


def test_a_taken_port_is_a_warning(ranks: RankPool, tmp_path: Path) -> None:
    port = free_port()
    for rank, said in enumerate(ranks.run(taken, world_size=2, args=(str(tmp_path / "monitor"), port))):
        assert any(f"127.0.0.1:{port + rank}" in text and "training goes on" in text for text in said), said
    assert not (tmp_path / "monitor" / "report.html").exists()


def unwritable(context: RankContext, folder: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = MonitorOutputs(history=f"{folder}/file/history", report=False)
        trainer = trainer_on_pool(context, DDPStrategy(), callbacks=[StepTimeline(f"{folder}/monitor"), outputs])
        trainer.fit(OddModule(sgd), loader_of(make_batches(context.world_size, 3)[context.rank]))
    return [str(warning.message) for warning in caught]


def test_a_history_that_cannot_be_written_is_a_warning(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said, _ = ranks.run(unwritable, world_size=2, args=(str(tmp_path),))
    assert any("the run is not judged" in text for text in said)


def alone(context: RankContext, folder: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_on_pool(context, DDPStrategy(), callbacks=[MonitorOutputs(history=f"{folder}/history")])
        trainer.fit(OddModule(sgd), loader_of(make_batches(context.world_size, 3)[context.rank]))
    return [str(warning.message) for warning in caught if "MonitorOutputs" in str(warning.message)]


def test_without_a_timeline_it_says_what_is_missing(ranks: RankPool, tmp_path: Path) -> None:
    said, silent = ranks.run(alone, world_size=2, args=(str(tmp_path),))
    assert ["without StepTimeline()" in text for text in said] == [True]
    assert silent == []
    assert not (tmp_path / "history").exists()


def broken(context: RankContext, folder: str) -> list[str]:
    def fail(record: Any) -> Any:
        raise ZeroDivisionError("as planned")

    with warnings.catch_warnings(record=True) as caught, patch("lightning_dist.monitor.outcome.diagnose", fail):
        warnings.simplefilter("always")
        outputs = MonitorOutputs(history=None)
        trainer = trainer_on_pool(context, DDPStrategy(), callbacks=[StepTimeline(folder), outputs])
        trainer.fit(OddModule(sgd), loader_of(make_batches(context.world_size, 3)[context.rank]))
    return [str(warning.message) for warning in caught if "MonitorOutputs" in str(warning.message)]


def test_a_verdict_that_fails_fails_no_training(ranks: RankPool, tmp_path: Path) -> None:
    said, silent = ranks.run(broken, world_size=2, args=(str(tmp_path / "monitor"),))
    assert ["not judged: ZeroDivisionError: as planned" in text for text in said] == [True]
    assert silent == []


def test_off_is_nothing_and_unknown_is_refused() -> None:
    assert monitor_callbacks("off") == []
    with pytest.raises(UnknownOptionError, match="allowed: on, off"):
        monitor_callbacks("of")
