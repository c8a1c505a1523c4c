"""Where the figures of a monitored run go: to loggers and Prometheus while it goes, to a report and a history after."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_dist.build.run_report import REPORT_FILE, write_report
from lightning_dist.callbacks.cluster_monitor import ClusterMonitor
from lightning_dist.callbacks.step_timeline import StepTimeline
from lightning_dist.capture import TrainerCapture, capture_of
from lightning_dist.capture.facts import rank_header
from lightning_dist.config.checks import check_local
from lightning_dist.monitor.exporters.means import IntervalMeans
from lightning_dist.monitor.exporters.prometheus import PrometheusEndpoint, require_package
from lightning_dist.monitor.goodput import goodput
from lightning_dist.monitor.outcome import Outcome, judge, size_bytes, wait_for_ranks
from lightning_dist.monitor.record import Sample, StepRecord
from lightning_dist.monitor.report.incident_lines import goodput_line
from lightning_dist.monitor.report.words import headline
from lightning_dist.monitor.shown_path import shown_path
from lightning_dist.monitor.whole_run import round_folders

_MOST_BYTES = 64 << 20  # of a run's files that rank 0 reads at the end: some seconds; beyond, the command does it
_OTHERS_S = 5.0  # for the other ranks to close their files


class MonitorOutputs(pl.Callback):
    """Hands on what :class:`StepTimeline` and :class:`ClusterMonitor` measure; give it after them.

    While the run goes, the means of each logging interval go to the Trainer's loggers as ``monitor/...``, those of rank
    0 without asking the others, and each rank serves its newest figures to Prometheus, if a port is given. At the end
    rank 0 says what bounds the step's time, writes ``report.html`` beside the run's files and leaves a small record in
    the history. What goes wrong in it is a warning; training goes on.

    Args:
        loggers: Log ``monitor/...``.
        report: Write the report.
        history: Folder of the history; ``None``: no record is kept.
        prometheus_port: Of a host's first rank; its other ranks take the ports after it. ``None``: nothing is served.
        prometheus_host: Address to listen on; other machines do not reach the default.

    Raises:
        ConfigError: The history is a URL; or a port is given, and prometheus-client is not installed.
    """

    def __init__(
        self,
        *,
        loggers: bool = True,
        report: bool = True,
        history: str | Path | None = "outputs/history",
        prometheus_port: int | None = None,
        prometheus_host: str = "127.0.0.1",
    ) -> None:
        self._logs = loggers
        self._reports = report
        check_local("MonitorOutputs(history)", history)
        self._history = history
        self._address = prometheus_port, prometheus_host
        if prometheus_port is not None:
            require_package(prometheus_port)
        # Made in `setup`, in the process that trains: what has locks cannot be sent to one that is spawned.
        self._means: IntervalMeans | None = None
        self._endpoint: PrometheusEndpoint | None = None
        self._capture: TrainerCapture | None = None
        self._heard: set[int] = set()
        self.outcome: Outcome | None = None  # of the last fit, on rank 0
        self.report_path: Path | None = None  # likewise

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Listen to those who measure."""
        if stage != "fit":
            return
        self.outcome = self.report_path = None
        self._means = IntervalMeans()
        try:
            self._capture = capture_of(trainer, self)
        except Exception as error:
            _say(f"it hands on nothing, training goes on: {type(error).__name__}: {error}")
            return
        self._capture.on_step(self._take_step)
        for timeline in _all(trainer, StepTimeline):
            timeline.is_read = True
        if (self._reports or self._history is not None) and not _all(trainer, StepTimeline) and trainer.is_global_zero:
            _say("without StepTimeline() among the callbacks there is no verdict, no report and no history")
        for monitor in _all(trainer, ClusterMonitor):
            if id(monitor) not in self._heard:  # it keeps its listeners from fit to fit
                self._heard.add(id(monitor))
                monitor.on_sample(self._take_sample)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Serve to Prometheus from now on."""
        port, host = self._address
        if port is None or self._capture is None:
            return
        endpoint = PrometheusEndpoint(port, host=host)
        try:
            endpoint.open(rank_header(trainer, unavailable={}))
        except Exception as error:
            _say(f"nothing is served at port {port}, training goes on: {type(error).__name__}: {error}")
            return
        if endpoint.problem is not None:
            _say(f"{endpoint.problem}; training goes on")
            return
        self._endpoint = endpoint

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log when Lightning does: not between the micro-batches of a step."""
        if not self._logs or self._means is None or not trainer.is_global_zero:
            return
        if not trainer._logger_connector.should_update_logs or trainer.fit_loop._should_accumulate():
            return
        means = self._means.take()
        try:
            for logger in trainer.loggers if means else ():
                logger.log_metrics(means, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        except Exception as error:
            self._logs = False
            _say(f"nothing more is logged as monitor/..., training goes on: {type(error).__name__}: {error}")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop to listen and to serve; a run that failed is not remembered."""
        self._close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Judge the run."""
        was_open = self._close()
        if stage != "fit" or not was_open or not trainer.is_global_zero:
            return
        folder = next((timeline.folder for timeline in _all(trainer, StepTimeline) if timeline.folder), None)
        if folder is None:
            return
        try:
            self._judge(trainer, folder)
        except Exception as error:  # training is over and went well, whatever this is
            _say(f"the run is not judged: {type(error).__name__}: {error}")

    def _judge(self, trainer: pl.Trainer, folder: Path) -> None:
        wait_for_ranks(folder, trainer.world_size, timeout_s=_OTHERS_S)
        if sum(map(size_bytes, round_folders(folder))) > _MOST_BYTES:
            rank_zero_info(f"hierdist: what bounds the step's time says: hierdist report {shown_path(folder)}")
            return
        self.outcome = judge(folder, history=None if self._history is None else Path(self._history))
        rank_zero_info(f"hierdist: {headline(self.outcome.verdict)}")
        whole = self.outcome.whole
        if len(whole.rounds) > 1 or whole.incidents:
            rank_zero_info(f"hierdist: {goodput_line(goodput(whole))}")
        if self._reports:
            self.report_path = folder / REPORT_FILE
            write_report(
                self.outcome.record,
                self.outcome.verdict,
                self.report_path,
                folder=folder,
                whole=self.outcome.whole,
            )
            rank_zero_info(f"hierdist: the report is in {shown_path(self.report_path)}")

    def _take_step(self, record: StepRecord) -> None:
        if self._means is not None:
            self._means.step(record)
        if self._endpoint is not None:
            self._endpoint.step(record)

    def _take_sample(self, sample: Sample) -> None:
        if self._means is not None:
            self._means.sample(sample)
        if self._endpoint is not None:
            self._endpoint.sample(sample)

    def _close(self) -> bool:
        """Whether it was open."""
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.release(self)
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()
        return capture is not None


def _say(text: str) -> None:
    """A user who makes warnings errors has no training that fails by them."""
    with contextlib.suppress(Warning):
        warnings.warn(f"MonitorOutputs: {text}", stacklevel=3)


def _all(trainer: pl.Trainer, kind: type[Any]) -> list[Any]:
    return [callback for callback in trainer.callbacks if isinstance(callback, kind)]  # type: ignore[attr-defined]  # an attribute of every Trainer
