"""The metrics of each rank and host, sampled by a thread while training runs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl

from lightning_dist.build.checkpoints import WRITE
from lightning_dist.callbacks.checkpoint import AsyncShardedCheckpoint
from lightning_dist.capture import TrainerCapture, capture_of, default_store
from lightning_dist.capture.facts import rank_header, run_facts
from lightning_dist.config.checks import check_local
from lightning_dist.events import EventStream
from lightning_dist.heartbeat import pulse_of
from lightning_dist.monitor.cluster import ClusterWatch, WatchSettings
from lightning_dist.monitor.record import Sample, StepRecord
from lightning_dist.monitor.run_files import FACTS, write_facts
from lightning_dist.state_strategy import StateStrategy


class ClusterMonitor(pl.Callback):
    """Samples what each rank's machine does, under any strategy, and writes a file of it for each rank.

    Data wait and communication a step, GPU (or CPU) utilisation, TCP and RDMA retransmits, bytes sent, received and
    read, memory, what checkpoints cost, ranks that stand still. It warns once where communication takes more than 30 %
    of the step, a host sends again what it has sent, or a rank does not beat. It never fails the training: what goes
    wrong in it is said once.

    Args:
        folder: Where to; if not given, ``monitor`` in the logger's folder, or in the Trainer's ``default_root_dir``.
            Where a run is there already, the name gets a number. If that folder is a URL, in the working directory.
            ``StepTimeline`` writes into the same.
        interval_s: Between two samples, in seconds; later in long runs up to 32 s.
        heartbeat_s: Between two beats, in seconds.
        heartbeat_timeout_s: A rank without a beat for so long is counted and named, in seconds; nothing is killed.

    Raises:
        ConfigError: The folder is a URL, a time is none, or the timeout is shorter than three beats.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        interval_s: float = 1.0,
        heartbeat_s: float = 1.0,
        heartbeat_timeout_s: float = 15.0,
    ) -> None:
        check_local("ClusterMonitor(folder)", folder)
        self.folder: Path | None = None  # of the present run, or the last one
        self._wanted = folder
        self._settings = WatchSettings(interval_s, heartbeat_s, heartbeat_timeout_s)
        self._listeners: list[Callable[[Sample], None]] = []
        self._capture: TrainerCapture | None = None
        self._watch: ClusterWatch | None = None
        self._streams: tuple[EventStream, ...] = ()  # of those who write checkpoints in the background

    def on_sample(self, listener: Callable[[Sample], None]) -> None:
        """Call with each sample of the fits to come, in a thread of the monitor; what it raises is said once."""
        self._listeners.append(listener)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Agree on the folder; collective."""
        if stage != "fit":
            return
        self._close()
        try:
            self._capture = capture_of(trainer, self)
            self._capture.on_step(self._take_step)
            self.folder = self._capture.folder(self._wanted)
        except Exception as error:
            self._close()
            _say(f"it measures nothing, training goes on: {type(error).__name__}: {error}")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to sample: by now the loaders are there, and those who write checkpoints have opened their streams.

        Tuners train several times in one fit; the last time is what stays in the files.
        """
        try:
            self._end_watch()
            self._open(trainer)
        except Exception as error:
            self._close()
            _say(f"it measures nothing, training goes on: {type(error).__name__}: {error}")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The strategy closes the store before any later hook."""
        if self._watch is not None:
            self._watch.end_heartbeat()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """End all threads: Lightning calls no teardown then."""
        self._close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write what is left and end all threads. Safe to call twice."""
        self._close()

    def _open(self, trainer: pl.Trainer) -> None:
        capture, folder = self._capture, self.folder
        if capture is None:
            return
        header = rank_header(trainer, unavailable=capture.unavailable)
        if folder is not None and trainer.is_global_zero and not (folder / FACTS).exists():
            with contextlib.suppress(OSError):  # the samples cannot be written there either, and that is said
                write_facts(folder, run_facts(trainer))
        self._streams = _checkpoint_streams(trainer)
        self._watch = watch = ClusterWatch(
            folder,
            header,
            self._settings,
            device=trainer.strategy.root_device,
            steps=lambda: trainer.global_step,
            store=default_store() if trainer.world_size > 1 else None,
            world_size=trainer.world_size,
            checkpoint_event=WRITE,
            writes_at_once=not self._streams,
            say=lambda text: _say(f"rank {header.rank}: {text}"),
            agent_timeouts=_agent_timeouts(trainer) if header.local_rank == 0 else None,
        )
        for listener in self._listeners:
            watch.on_sample(listener)
        for stream in self._streams:
            stream.add_sink(watch.take_event)

    def _take_step(self, record: StepRecord) -> None:
        if self._watch is not None:
            self._watch.take_step(record)

    def _close(self) -> None:
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.release(self)
        self._end_watch()

    def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        streams, self._streams = self._streams, ()
        if watch is not None:
            for stream in streams:
                stream.remove_sink(watch.take_event)
            watch.close()


def _say(text: str) -> None:
    """From any thread; a user who makes warnings errors has no training that fails by them."""
    with contextlib.suppress(Warning):
        warnings.warn(f"ClusterMonitor: {text}", stacklevel=2)


def _agent_timeouts(trainer: pl.Trainer) -> Callable[[], int] | None:
    """Where the agent of ``hierdist launch`` counts; the first rank of each host tells."""
    pulse = pulse_of(trainer)
    return None if pulse is None else lambda: pulse.timeouts


def _checkpoint_streams(trainer: pl.Trainer) -> tuple[EventStream, ...]:
    """Of those who write checkpoints beside training."""
    strategy = trainer.strategy
    if isinstance(strategy, StateStrategy):
        return (strategy.events,) if strategy.checkpoint_config.is_sharded else ()
    savers = [each for each in trainer.callbacks if isinstance(each, AsyncShardedCheckpoint)]  # type: ignore[attr-defined]  # it is set by a connector
    return tuple(saver.events for saver in savers if saver.events is not None)
