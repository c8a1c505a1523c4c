"""The metrics of each rank and host, sampled by a thread while training runs."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_dist.build.checkpoints import WRITE
from lightning_dist.callbacks.checkpoint import AsyncShardedCheckpoint
from lightning_dist.events import EventStream
from lightning_dist.monitor.cluster import ClusterWatch, WatchSettings
from lightning_dist.monitor.record import RankHeader, Sample
from lightning_dist.state_strategy import StateStrategy
from lightning_dist.topology.discover import host_identity


class ClusterMonitor(pl.Callback):
    """Samples what each rank's machine does, under any strategy, and writes a file of it for each rank.

    Data wait and communication a step, GPU (or CPU) utilisation, TCP and RDMA retransmits, bytes sent, received and
    read, memory, what checkpoints cost, ranks that stand still. It warns once where communication takes more than 30 %
    of the step, a host sends again what it has sent, or a rank does not beat. It never fails the training: what goes
    wrong in it is said once.

    Args:
        folder: Where to; ``monitor`` in the Trainer's log folder if not given. ``hierdist report`` reads it.
        interval_s: Between two samples, in seconds; later in long runs up to 32 s.
        heartbeat_s: Between two beats, in seconds.
        heartbeat_timeout_s: A rank without a beat for so long is counted and named, in seconds; nothing is killed.

    Raises:
        ConfigError: A time is none, or the timeout is shorter than three beats.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        interval_s: float = 1.0,
        heartbeat_s: float = 1.0,
        heartbeat_timeout_s: float = 15.0,
    ) -> None:
        self.folder: Path | None = None  # where the files of the last fit are
        self._asked_folder = folder
        self._settings = WatchSettings(interval_s, heartbeat_s, heartbeat_timeout_s)
        self._listeners: list[Callable[[Sample], None]] = []
        self._watch: ClusterWatch | None = None
        self._streams: tuple[EventStream, ...] = ()  # of those who write checkpoints in the background

    def on_sample(self, listener: Callable[[Sample], None]) -> None:
        """Call with each sample of the fits to come, in a thread of the monitor; what it raises is said once."""
        self._listeners.append(listener)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to sample."""
        self._close()
        try:
            self._open(trainer)
        except Exception as error:
            self._close()
            _say(f"it measures nothing, training goes on: {type(error).__name__}: {error}")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """By now those who write checkpoints have opened their streams."""
        if self._watch is not None:
            self._streams = _checkpoint_streams(trainer)
            for stream in self._streams:
                stream.add_sink(self._watch.take_event)

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
        header = _header(trainer)
        self.folder = Path(self._asked_folder or Path(trainer.log_dir or trainer.default_root_dir) / "monitor")
        self._watch = ClusterWatch(
            self.folder,
            header,
            self._settings,
            device=trainer.strategy.root_device,
            steps=lambda: trainer.global_step,
            store=_default_store() if trainer.world_size > 1 else None,
            world_size=trainer.world_size,
            checkpoint_event=WRITE,
            writes_at_once=lambda: not self._streams,
            say=lambda text: _say(f"rank {header.rank}: {text}"),
        )
        for listener in self._listeners:
            self._watch.on_sample(listener)

    def _close(self) -> None:
        watch, self._watch = self._watch, None
        if watch is None:
            return
        for stream in self._streams:
            stream.remove_sink(watch.take_event)
        self._streams = ()
        watch.close()


def _say(text: str) -> None:
    """From any thread; a user who makes warnings errors has no training that fails by them."""
    with contextlib.suppress(Warning):
        warnings.warn(f"ClusterMonitor: {text}", stacklevel=2)


def _default_store() -> dist.Store | None:
    if not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()  # the store has no public accessor


def _checkpoint_streams(trainer: pl.Trainer) -> tuple[EventStream, ...]:
    strategy = trainer.strategy
    if isinstance(strategy, StateStrategy):
        return (strategy.events,) if strategy.checkpoint_config.is_sharded else ()
    savers = [callback for callback in trainer.callbacks if isinstance(callback, AsyncShardedCheckpoint)]  # type: ignore[attr-defined]  # an attribute of every Trainer
    return tuple(saver.events for saver in savers if saver.events is not None)


def _header(trainer: pl.Trainer) -> RankHeader:
    strategy = trainer.strategy
    device = strategy.root_device
    name = f" {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    return RankHeader(
        rank=trainer.global_rank,
        local_rank=trainer.local_rank,
        host=_host(trainer),
        device=f"{device}{name}",
        pid=os.getpid(),
        started_wall_ns=time.time_ns(),
        started_ns=time.monotonic_ns(),
    )


def _host(trainer: pl.Trainer) -> str:
    run = trainer.strategy.run_context if isinstance(trainer.strategy, StateStrategy) else None
    if run is not None:
        return run.cluster.host_of(trainer.global_rank)
    return host_identity(os.environ).label
