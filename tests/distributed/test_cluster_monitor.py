"""ClusterMonitor beside real training: what it writes, and that whatever fails in it fails nothing else."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.utils.data import DataLoader

from lightning_dist import AsyncShardedCheckpoint, ClusterMonitor
from lightning_dist.monitor.alarms import Alarms
from lightning_dist.monitor.heartbeat import LANE, Heartbeat
from lightning_dist.monitor.record import RankRecord
from lightning_dist.monitor.run_files import read_run
from lightning_dist.monitor.sampling.memory import MemorySource
from tests.distributed.lightning_runs import (
    ListDataset,
    OddModule,
    loader_of,
    make_batches,
    sgd,
    strategy_of,
    trainer_on_pool,
)
from tests.distributed.pipeline_runs import StageCase, StageLearner
from tests.distributed.pipeline_runs import strategy_for as stage_strategy
from tests.distributed.tensor_runs import SplitCase, SplitLearner
from tests.distributed.tensor_runs import strategy_for as split_strategy
from tests.support.faults import Fault, FaultPlan
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

STEPS = 12
OF_EACH_RANK = {
    *("cpu_utilisation", "memory", "read_bytes", "data_wait", "communication_share", "exposed_communication_share"),
    *("checkpoint_stall", "checkpoint_write", "heartbeat_timeouts"),
}
OF_THE_HOST = {"tcp_retransmits", "tcp_sent_segments", "tcp_retransmits_per_step", "network_sent", "network_received"}


class Slow(pl.Callback):
    """Steps last as long as a few samples: some are taken in each run."""

    def on_train_batch_start(self, trainer: pl.Trainer, *arguments: Any) -> None:
        threading.Event().wait(0.05)


class Fails(pl.Callback):
    """In the middle of an epoch."""

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        if trainer.global_step == STEPS // 2:
            raise RuntimeError("as planned")


def alive() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("hierdist-monitor"))


def fit(
    context: RankContext, monitor: ClusterMonitor | None, *callbacks: pl.Callback, strategy: Any = None, **others: Any
) -> list[torch.Tensor]:
    """The weights afterwards."""
    module = others.pop("module", None) or OddModule(sgd)
    loader = others.pop("loader", loader_of)(make_batches(context.world_size, STEPS)[context.rank])
    every = [each for each in (monitor, *callbacks) if each is not None]
    is_saving = any(isinstance(each, ModelCheckpoint) for each in every)
    others = {"callbacks": every, "enable_checkpointing": is_saving, **others}
    trainer = trainer_on_pool(context, strategy or DDPStrategy(), **others)
    trainer.fit(module, loader)
    return [parameter.detach().clone() for parameter in module.parameters()]


def monitor_in(folder: str | Path, **others: Any) -> ClusterMonitor:
    options: dict[str, Any] = {"interval_s": 0.02, "heartbeat_s": 0.05, "heartbeat_timeout_s": 20.0}
    return ClusterMonitor(folder, **{**options, **others})


def series_of(context: RankContext, kind: str, folder: str) -> list[str]:
    strategy = DDPStrategy() if kind in ("ddp", "ddp_sharded") else strategy_of(parallel=kind)
    saves = ModelCheckpoint if kind == "ddp" else AsyncShardedCheckpoint
    fit(
        context,
        monitor_in(folder),
        Slow(),
        saves(f"{folder}/checkpoints", every_n_train_steps=4, save_top_k=-1),
        strategy=strategy,
    )
    return alive()


@pytest.mark.parametrize(
    "kind",
    sampled(
        {kind: (kind,) for kind in ("ddp", "ddp_sharded", "zero1", "zero2", "zero3")}, always=["ddp_sharded", "zero2"]
    ),
)
def test_each_rank_writes_its_series(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    assert ranks.run(series_of, world_size=2, args=(kind, str(tmp_path / "monitor"))) == [[], []]
    run = read_run(tmp_path / "monitor")
    assert run.problems == ()
    assert sorted(run.ranks) == [0, 1]
    assert run.facts.options.get("checkpoint.mode") == (None if kind == "ddp" else "async_sharded")
    for rank, record in run.ranks.items():
        _check_series(record, OF_EACH_RANK | OF_THE_HOST if rank == 0 else OF_EACH_RANK)


def _check_series(record: RankRecord, expected: set[str]) -> None:
    assert {sample.metric for sample in record.samples} == expected
    assert expected.isdisjoint(record.header.unavailable)
    assert "no GPU" in record.header.unavailable["gpu_utilisation"]
    for metric in expected:
        series = record.series(metric)
        assert all(sample.value >= 0 for sample in series), metric
        assert [sample.step for sample in series] == sorted(sample.step for sample in series), metric
    assert record.series("memory")[-1].step == STEPS
    assert record.series("heartbeat_timeouts")[-1].value == 0
    stalls, writes = record.series("checkpoint_stall"), record.series("checkpoint_write")
    assert len(stalls) == len(writes) == STEPS // 4
    assert [sample.step for sample in stalls] == [3, 7, 11]
    assert all(write.step >= stall.step for stall, write in zip(stalls, writes, strict=True))


def series_of_split(context: RankContext, kind: str, folder: str) -> list[str]:
    pipeline, tensor = StageCase(), SplitCase()
    strategy = stage_strategy(pipeline) if kind == "pipeline" else split_strategy(tensor)
    module = StageLearner(pipeline) if kind == "pipeline" else SplitLearner(tensor)
    callbacks: list[pl.Callback] = [monitor_in(folder), Slow()]
    trainer_on_pool(context, strategy, callbacks=callbacks, limit_val_batches=0).fit(module)
    return alive()


@pytest.mark.parametrize("kind", sampled({kind: (kind,) for kind in ("pipeline", "tensor")}, always=[]))
def test_ranks_that_share_a_model_write_their_series(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    assert ranks.run(series_of_split, world_size=2, args=(kind, str(tmp_path / "m"))) == [[], []]
    run = read_run(tmp_path / "m")
    assert run.problems == ()
    for rank, record in run.ranks.items():
        of_checkpoints = {"checkpoint_stall", "checkpoint_write"}
        expected = (OF_EACH_RANK | OF_THE_HOST if rank == 0 else OF_EACH_RANK) - of_checkpoints
        assert {sample.metric for sample in record.samples} == expected


class Adjustable(OddModule):
    """A learning rate that a tuner sets."""

    lr = 0.1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def fit_tuned(context: RankContext, folder: str) -> list[str]:
    tuner = LearningRateFinder(num_training_steps=5, early_stop_threshold=None)
    fit(
        context,
        monitor_in(f"{folder}/m"),
        Slow(),
        tuner,
        strategy=SingleDeviceStrategy("cpu"),
        module=Adjustable(sgd),
        default_root_dir=folder,
    )
    return alive()


def test_one_process_alone_that_is_tuned_first(ranks: RankPool, tmp_path: Path) -> None:
    """A tuner trains before training begins; nobody looks at one rank."""
    run = ranks.run(fit_tuned, world_size=1, args=(str(tmp_path),), init_group=False, fresh=True)  # a bar has a thread
    assert run == [[]]
    record = read_run(tmp_path / "m").ranks[0]
    assert "nobody to look at it" in record.header.unavailable["heartbeat_timeouts"]
    assert {sample.metric for sample in record.samples} >= {*OF_THE_HOST, "cpu_utilisation", "data_wait"}
    assert not record.series("heartbeat_timeouts")
    assert record.samples[-1].step == STEPS


# -- what fails in it --------------------------------------------------------------------------------------------------


def _raising(*arguments: Any, **named: Any) -> Any:
    raise OSError("as planned")


@contextmanager
def broken_source() -> Iterator[None]:
    with patch.object(MemorySource, "read", _raising):
        yield


@contextmanager
def broken_opener() -> Iterator[None]:
    with patch("lightning_dist.monitor.sampling.opening.RankProcesses", _raising):
        yield


@contextmanager
def broken_store() -> Iterator[None]:
    with patch.object(Heartbeat, "_connected", _raising):
        yield


@contextmanager
def nothing() -> Iterator[None]:
    yield


def _full(folder: Path, rank: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"samples-{rank:05d}.jsonl").symlink_to("/dev/full")


BROKEN: dict[str, Callable[[], Any]] = {
    "source": broken_source,
    "opening": broken_opener,
    "store": broken_store,
    "listener": nothing,
    "folder": nothing,
    "disk": nothing,
}
SAID = {
    "source": "reading memory failed: OSError: as planned",
    "opening": "it measures nothing",
    "store": "the heartbeat has ended",
    "listener": "handing on samples",
    "folder": "the run's folder cannot be made",
    "disk": "could not be written: [Errno 28]",
}


def fit_with_broken(context: RankContext, folder: str) -> dict[str, Any]:
    """Each way in turn: what was said, and whether the weights are those of a fit without a monitor."""
    found: dict[str, Any] = {}
    plain = fit(context, None)
    for name, breaking in BROKEN.items():
        path = Path(folder, name)
        monitor = monitor_in(path)
        if name == "listener":
            monitor.on_sample(_raising)
        elif name == "folder" and context.rank == 0:
            path.write_text("a file where the folder should be")
        context.barrier()
        quiet = patch.object(Alarms, "take", return_value=None)  # the machine is real
        with breaking(), quiet, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            filled = patch.object(ClusterMonitor, "_open", _filling_disk(context.rank, ClusterMonitor._open))
            with filled if name == "disk" else nothing():
                trained = fit(context, monitor, Slow())
        said = [str(each.message) for each in caught if str(each.message).startswith("ClusterMonitor")]
        found[name] = (said, all(map(torch.equal, plain, trained)), alive())
    return found


def _filling_disk(rank: int, opening: Callable[..., None]) -> Callable[..., None]:
    def open_on_full_disk(monitor: ClusterMonitor, trainer: pl.Trainer) -> None:
        assert monitor.folder is not None
        _full(monitor.folder, rank)
        opening(monitor, trainer)

    return open_on_full_disk


def test_whatever_fails_is_said_once_and_training_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run(fit_with_broken, world_size=2, args=(str(tmp_path),), deadline_s=100):
        for name, (said, is_same, left) in found.items():
            assert [text for text in said if SAID[name] in text] == said, (name, said)
            assert len(said) == 1, (name, said)
            assert is_same, name
            assert left == [], name


def fit_and_fail(context: RankContext, folder: str) -> list[Any]:
    found: list[Any] = []
    with pytest.raises(RuntimeError, match="as planned"):
        fit(context, monitor_in(folder), Slow(), Fails())
    found.append(alive())
    monitor = monitor_in(folder)
    for _ in range(2):  # one callback, two Trainers
        fit(context, monitor, Slow(), loader=_forking)
        found.append((alive(), monitor.folder))
    return found


def _forking(batches: list[Any]) -> DataLoader[Any]:
    """Readers that are forked while the monitor's threads run."""
    return DataLoader(ListDataset(batches), batch_size=None, num_workers=1, multiprocessing_context="fork")


def test_threads_are_gone_after_a_failure_and_it_can_be_used_again(ranks: RankPool, tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("m", "m-1", "m-2"))
    for found in ranks.run(fit_and_fail, world_size=2, args=(str(first),)):
        assert found == [[], ([], second), ([], third)]
    for folder in (first, second, third):
        assert read_run(folder).problems == ()
        for rank in (0, 1):
            written = (folder / f"samples-{rank:05d}.jsonl").read_text().splitlines()
            assert len(written) == len(set(written)) > 5  # no reader wrote what it was forked with


# -- a rank that stands still ------------------------------------------------------------------------------------------


class Stopped(pl.Callback):
    """Rank 1 is stopped in one step, and goes on after a while."""

    def __init__(self, context: RankContext) -> None:
        plan = FaultPlan([Fault(rank=1, kind="pause", operation="step", nth=4, pause_s=2.5)])
        self._point = plan.point(context.rank, context.tmp_path)
        self._rank = context.rank

    def on_train_batch_start(self, trainer: pl.Trainer, *arguments: Any) -> None:
        self._point("step", "", self._rank)


def fit_with_a_stop(context: RankContext, folder: str) -> list[str]:
    monitor = monitor_in(folder, heartbeat_timeout_s=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(context, monitor, Slow(), Stopped(context))
    return [str(each.message) for each in caught if "heartbeat" in str(each.message)]


def test_a_stopped_rank_is_named_and_counted_and_comes_back(ranks: RankPool, tmp_path: Path) -> None:
    layout = {"a": [0], "b": [1]}
    said, _ = ranks.run(fit_with_a_stop, layout=layout, args=(str(tmp_path / "m"),), fresh=True)
    late, back = (text for text in said if "rank 1 (host b)" in text)
    assert "no heartbeat from" in late
    assert "heartbeats again from" in back
    looking = read_run(tmp_path / "m").ranks[0]
    assert looking.series("heartbeat_timeouts")[-1].value >= 1
    silences = [span for span in looking.spans if span.lane == LANE and span.name == "rank 1 (host b)"]
    assert max(span.end_ns - span.start_ns for span in silences) > 10**9
