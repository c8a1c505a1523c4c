"""Streamed data through the Trainer, on ranks: resuming at any size, evaluation, models over several ranks, ends."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from tqdm import tqdm

from lightning_dist import DataConfig, ShardedDataModule, ShardedLoader, Source
from lightning_dist.data.formats.tokens import TokensFormat
from lightning_dist.data.storage.shards import open_read_folder
from tests.distributed.lightning_runs import strategy_of, trainer_on_pool
from tests.distributed.streamed_runs import (
    OPTIONS,
    Case,
    Logging,
    loader_of,
    part_of_run,
    resume_problems,
    strategies_of,
)
from tests.faults.fits import ending_of_fit
from tests.support.fresh import run_script
from tests.support.leaks import Snapshot
from tests.support.numbered import Ids, ids_of, write_tokens_of
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

MIDDLES = [3, 7, 9]  # of seven steps an epoch: in the middle, at its end, in the next
EPOCH_ENDS = {"every_n_epochs": 1, "save_on_train_epoch_end": True}
STEPS = {"max_epochs": -1, "max_steps": 16}

RESUMES: dict[str, tuple[Any, ...]] = {
    "plain": (Case(), MIDDLES),
    "folders": (Case("async", "list", {"workers": 2, "prefetch": 8}), MIDDLES),
    "zero3": (Case("zero3", "bare", {"last_batch": "short"}), MIDDLES),
    "ddp": (Case("ddp", data={"workers": 2, "persistent": True}), MIDDLES),
    "ddp alone": (Case("ddp", "bare"), MIDDLES),
    "processes": (Case(data={"workers": 2, "readers": "processes", "persistent": True}), [3, 9]),
    "endless": (Case(data={"epoch": "endless", "workers": 2}), MIDDLES),
    "padded": (Case("ddp", data={"last_batch": "pad", "pin_memory": True}), MIDDLES),
    "dict": (Case("ddp", "dict"), MIDDLES),
    "shortest": (Case("hierdist", "min_size"), MIDDLES),
    "beside one without length": (Case("hierdist", "beside"), MIDDLES),
    "beside, ddp": (Case("ddp", "beside"), MIDDLES),
    "asked early": (Case("async", asks=True), MIDDLES),
    "asked early, ddp": (Case("ddp", "bare", asks=True), MIDDLES),
    "validation": (Case(has_val=True, trainer={"val_check_interval": 2, "num_sanity_val_steps": 2}), None),
    "validation by parts": (Case("ddp", has_val=True, trainer={"val_check_interval": 0.5}), None),
    "after validation": (
        Case(has_val=True, trainer={"val_check_interval": 2}, save={"every_n_epochs": 1}),
        None,
    ),
    "limited": (Case(trainer={"limit_train_batches": 3}), None),
    "accumulating": (Case(trainer={"accumulate_grad_batches": 2}), None),
    "beside, loaders anew": (Case("async", "beside", trainer={"reload_dataloaders_every_n_epochs": 1}), MIDDLES),
    "loaders anew": (Case(trainer={"reload_dataloaders_every_n_epochs": 1}), MIDDLES),
    "steps": (Case(trainer=STEPS), MIDDLES),
    "steps, ddp": (Case("ddp", asks=True, trainer=STEPS), MIDDLES),
    "epoch ends": (Case(save=EPOCH_ENDS), None),
    "epoch ends, ddp": (Case("ddp", "bare", save=EPOCH_ENDS), None),
    "epoch ends, steps": (Case("async", "list", asks=True, trainer=STEPS, save=EPOCH_ENDS), None),
    "epoch ends, beside": (Case("ddp", "beside", save=EPOCH_ENDS), None),
    "limited epoch ends": (Case("ddp", trainer={"limit_train_batches": 3}, save=EPOCH_ENDS), None),
}


@pytest.mark.parametrize(
    ("case", "steps"), sampled(RESUMES, ["folders", "ddp", "beside one without length", "asked early", "validation"])
)
def test_a_resumed_run_trains_on_what_was_left(ranks: RankPool, case: Case, steps: list[int] | None) -> None:
    fresh = case.strategy == "zero3"  # torch keeps meshes, and their groups, as long as the process
    assert ranks.run(resume_problems, world_size=2, args=("c", case, steps), deadline_s=110, fresh=fresh) == [[], []]


# -- other world sizes ------------------------------------------------------------------------------------------------

SHORT = {"last_batch": "short", "workers": 2}
SIZES = [(2, 3, 2), (1, 5, 2), (3, 3, 2), (2, None, 3)]  # ranks, batches until it ends, samples a batch
LATE = [(1, 13, 2), (4, 3, 2), (1, None, 2)]  # 26 of 29 samples were taken, so that 4 ranks find too few for a step

ELASTIC: dict[str, tuple[Any, ...]] = {
    "folders": (Case("async", data=SHORT), SIZES),
    "files, ddp": (Case("ddp", data=SHORT), SIZES),
    "late": (Case(data=SHORT), LATE),
    "loaders of the module": (Case("async", "bare", SHORT, asks=True), SIZES),
    "ddp alone": (Case("ddp", "bare", SHORT), SIZES),
    "steps": (Case("async", data=SHORT, trainer={"max_steps": 40}), SIZES),
    "validation": (Case(data=SHORT, has_val=True, trainer={"val_check_interval": 0.5}), SIZES),
    "accumulating": (Case(data=SHORT, trainer={"accumulate_grad_batches": 2}), [(2, 2, 2), (1, 4, 2), (2, None, 2)]),
}


@pytest.mark.parametrize(("case", "sizes"), sampled(ELASTIC, ["folders", "files, ddp", "late"]))
def test_each_sample_once_an_epoch_at_changing_world_sizes(
    ranks: RankPool, tmp_path: Path, case: Case, sizes: list[tuple[int, int | None, int]]
) -> None:
    step, trained = None, []
    for world_size, batches, batch_size in sizes:
        part = dataclasses.replace(case, data={**case.data, "batch_size": batch_size})
        got = ranks.run(part_of_run, world_size=world_size, args=(part, tmp_path / "c", step, batches), deadline_s=60)
        assert len({(step, length, len(log)) for log, step, length in got}) == 1
        assert got[0][2] == -(-(29 - world_size + 1) // (world_size * batch_size)), "steps an epoch, at each size"
        trained += [entry for log, _, _ in got for entry in log]
        step = got[0][1]
    for epoch in range(3):
        samples = [sample for number, (batch,) in trained if number == epoch for sample in batch]
        late = sizes is LATE and epoch < 2  # the last samples of epoch 0 are taken with the first of epoch 1
        assert late or sorted(samples) == list(range(29)), epoch
    samples = [sample for _, (batch,) in trained for sample in batch]
    assert sorted(samples) == sorted(3 * list(range(29)))


# -- evaluation -------------------------------------------------------------------------------------------------------


class Answers(pl.LightningModule):
    """Of sample i says i, but for sample 3."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.accuracy = torchmetrics.MeanMetric()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch.float()[:, None]).mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.layer(batch.float()[:, None])
        right = (batch != 3).float()
        self.log("logged", right.mean(), sync_dist=True, on_epoch=True, batch_size=len(batch))
        self.accuracy.update(right)
        self.log("metric", self.accuracy, on_epoch=True)

    test_step = validation_step

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def evaluate(context: RankContext, strategy: str, batch_size: int) -> tuple[list[float], list[int]]:
    """Validate, fit, test and predict with one Trainer; validation first must not move the training data."""
    data = ShardedDataModule(Ids(12), val=Ids(5), test={"a": Ids(5)}, predict=Ids(5), config={"batch_size": batch_size})
    module = Answers()
    trainer = trainer_on_pool(context, strategies_of(strategy), num_sanity_val_steps=2)
    found = []
    for run in (trainer.validate, trainer.fit, trainer.test):
        run(module, datamodule=data)
        found += [round(float(trainer.callback_metrics[name]), 6) for name in ("logged", "metric")]
    predictions = trainer.predict(module, datamodule=data)
    return found, [sample for batch in predictions or () for sample in batch.tolist()]


@pytest.mark.parametrize(
    ("strategy", "batch_size"),
    [
        ("ddp", 1),
        ("hierdist", 2),
        ("zero3", 4),
        *(pytest.param(name, 1, marks=pytest.mark.sweep) for name in ("hierdist", "zero3")),
        *(pytest.param(name, 4, marks=pytest.mark.sweep) for name in ("hierdist", "ddp")),
    ],
)
def test_evaluation_counts_each_sample_once(ranks: RankPool, strategy: str, batch_size: int) -> None:
    fresh = strategy == "zero3"
    got = ranks.run(evaluate, world_size=2, args=(strategy, batch_size), fresh=fresh)
    for metrics, _ in got:
        assert metrics[1::2] == [0.8] * 3
        # Lightning's own ddp rounds the mean number of samples a rank has, 2.5, down.
        assert metrics[::2] == [1.0 if strategy == "ddp" else 0.8] * 3
    assert all(predicted == sorted(predicted) for _, predicted in got)
    assert sorted(got[0][1] + got[1][1]) == list(range(5))


# -- fits one after the other -----------------------------------------------------------------------------------------


def fit_twice(context: RankContext, strategy: str) -> list[Any]:
    """One Trainer, one module, one loader, and a stop in the middle of an epoch."""
    module = Logging(lambda: loader)
    loader = loader_of(29, last_batch="short")
    trainer = trainer_on_pool(context, strategies_of(strategy), max_epochs=1, limit_train_batches=3)
    trainer.fit(module)
    trainer.fit_loop.max_epochs = trainer.fit_loop.max_epochs + 1
    trainer.fit_loop.epoch_loop.max_steps = -1
    trainer.fit(module)
    return module.trained


@pytest.mark.parametrize("strategy", ["hierdist", pytest.param("ddp", marks=pytest.mark.sweep)])
def test_a_second_fit_goes_on_with_the_next_epoch(ranks: RankPool, strategy: str) -> None:
    for log in ranks.run(fit_twice, world_size=2, args=(strategy,)):
        first, second = ([entry[1] for entry in log if entry[0] == epoch] for epoch in (0, 1))
        assert len(first) == len(second) == 3
        assert first != second


def search_for_a_rate(context: RankContext, strategy: str, folder: Path) -> list[Any]:
    """The rate that is found, and what is trained on after the search and without one."""
    tqdm.monitor_interval = 0  # the search's bar would start a thread that stays
    found: list[Any] = []
    for searches in (True, False):
        module, data = Logging(), ShardedDataModule(Ids(29), config=OPTIONS)
        module.lr = 0.01  # type: ignore[assignment]  # the name that the search looks for
        trainer = trainer_on_pool(context, strategies_of(strategy), default_root_dir=folder)
        if searches:
            search = Tuner(trainer).lr_find(module, datamodule=data, num_training=5, update_attr=False)
            found.append(None if search is None else search.results["loss"])
            module.trained.clear()
        trainer.fit(module, datamodule=data)
        found.append(module.trained)
    return found


@pytest.mark.parametrize("strategy", ["zero3", pytest.param("async", marks=pytest.mark.sweep)])
def test_training_is_the_same_after_a_search_for_a_learning_rate(
    ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    got = ranks.run(search_for_a_rate, world_size=2, args=(strategy, tmp_path), fresh=True)
    for losses, after_search, without in got:
        assert len(losses) == 5
        assert losses == got[0][0], "all ranks have the same results"
        assert after_search == without


# -- models over several ranks ----------------------------------------------------------------------------------------


class Cut(Logging):
    """Two layers, one for each stage."""

    def __init__(self, make_loaders: Any) -> None:
        super().__init__(make_loaders)
        self.layer = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Linear(2, 1))  # type: ignore[assignment]

    def pipeline_layers(self) -> Any:
        return self.layer

    def pipeline_input(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.float()[:, None]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(self.pipeline_input(batch)).mean()  # type: ignore[no-any-return]

    def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, batch_idx: int) -> None:
        self.trained.append((self.trainer.current_epoch, [ids_of(batch)]))


def train_split(context: RankContext, parallel: Any, last_batch: str = "drop") -> list[Any]:
    """The model of :class:`Cut`, over several ranks."""
    module = Cut(lambda: loader_of(29, last_batch=last_batch, batch_size=4))
    trainer_on_pool(context, strategy_of(parallel=parallel), max_epochs=2).fit(module)
    return module.trained


SPLIT = {
    "pipeline": {"mode": "pipeline"},
    "tensor": {"mode": "tensor", "tensor": {"plan": {"layer.0": "column", "layer.1": "row"}}},
}


@pytest.mark.parametrize("parallel", SPLIT.values(), ids=SPLIT)
def test_ranks_of_a_replica_read_the_same(ranks: RankPool, parallel: dict[str, Any]) -> None:
    """Two hosts of two ranks, each host a replica."""
    logs = ranks.run(train_split, layout={"a": [0, 1], "b": [2, 3]}, args=(parallel,), fresh=True)
    assert logs[0] == logs[1]
    assert logs[2] == logs[3]
    for epoch in (0, 1):
        samples = [s for log in logs[::2] for number, (batch,) in log if number == epoch for s in batch]
        assert len(samples) == len(set(samples)) == 24


LAST = {
    f"{mode}, {last}": (SPLIT.get(mode, mode), last)
    for mode in ("pipeline", "tensor", "zero3")
    for last in ("drop", "pad", "short")
}


@pytest.mark.parametrize(("parallel", "last_batch"), sampled(LAST, ["pipeline, short", "tensor, pad", "zero3, short"]))
def test_what_fills_no_batch_is_trained_on_as_it_was_said(ranks: RankPool, parallel: Any, last_batch: str) -> None:
    """29 samples in batches of four: of one replica, or of two that share the gradients of each step."""
    logs = ranks.run(train_split, world_size=2, args=(parallel, last_batch), fresh=True)
    replicas = logs if parallel == "zero3" else logs[:1]
    assert len(replicas) == 2 or logs[0] == logs[1]
    for epoch in (0, 1):
        batches = [[batch for number, (batch,) in log if number == epoch] for log in replicas]
        samples = [sample for each in batches for batch in each for sample in batch]
        step = 4 * len(replicas)
        assert {len(each) for each in batches} == {29 // step + (last_batch != "drop")}
        if last_batch == "drop":
            assert len(samples) == len(set(samples)) == 29 // step * step
        else:
            assert set(samples) == set(range(29))
            assert len(samples) == (32 if last_batch == "pad" else 29)


# -- what cannot be read ----------------------------------------------------------------------------------------------


def read_torn(context: RankContext, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """How a fit ends if a shard lacks its end."""
    loader = ShardedLoader(folder, config=DataConfig(batch_size=2, lanes=2, last_batch="short", **options))
    module = Logging(lambda: loader)
    strategy = strategy_of(sync={"timeout_s": 10.0})
    before = Snapshot.take()
    ending = ending_of_fit(trainer_on_pool(context, strategy), module)
    loader.close()
    events = strategy.events.snapshot()
    return {
        **ending,
        "sizes": [len(batch) for _, (batch,) in module.trained],
        "skipped": sum(event.value for event in events if event.name == "data.skipped"),
        "waits": [event.attributes["samples"] for event in events if event.name == "data.wait"],
        "leaks": [leak for leak in before.leaks(grace_s=5.0) if "thread" in leak or "child" in leak],
    }


@pytest.mark.parametrize("readers", [{}, {"workers": 1}, {"workers": 1, "readers": "processes"}], ids=str)
def test_an_unreadable_shard_ends_the_run_on_all_ranks(ranks: RankPool, tmp_path: Path, readers: Any) -> None:
    folder = write_tokens_of(tmp_path / "data", [12, 12])
    path = folder / "shard-1.bin"
    path.write_bytes(path.read_bytes()[:-30])  # the last chunk has 34
    got = ranks.run(read_torn, world_size=2, args=(folder, readers), fresh=True, deadline_s=40)
    assert all(ending["text"] for ending in got)
    assert any("shard-1.bin" in ending["trace"] for ending in got)
    assert [ending["leaks"] for ending in got] == [[], []]
    got = ranks.run(read_torn, world_size=2, args=(folder, {**readers, "on_unreadable": "skip"}), fresh=True)
    assert [ending["text"] for ending in got] == ["", ""]
    assert [ending["sizes"] for ending in got] == [ending["waits"] for ending in got] == [[2] * 6] * 2
    assert sum(ending["skipped"] for ending in got) == 4


# -- mixtures ---------------------------------------------------------------------------------------------------------


def train_mixture(context: RankContext, folder: Path, step: int | None) -> list[int]:
    """An epoch of two sources, or what is left of it."""
    sources = [Source(Ids(40), weight=3.0), Source(folder / "tokens", weight=1.0)]
    config = DataConfig(batch_size=4 // context.world_size, lanes=4, last_batch="short")
    module = Logging(lambda: ShardedLoader(sources, config=config, collate=mixed_ids, epoch_samples=48))
    saver = ModelCheckpoint(folder / "c", filename="{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = trainer_on_pool(context, strategy_of(), callbacks=[saver], enable_checkpointing=True)
    trainer.fit(module, ckpt_path=None if step is None else folder / "c" / f"step={step}.ckpt")
    return [sample for _, (batch,) in module.trained for sample in batch]


def mixed_ids(samples: list[Any]) -> torch.Tensor:
    """Samples of token shards are told by 1000 more."""
    return torch.tensor([s if isinstance(s, int) else 1000 + int(s[0]) for s in samples])


def test_a_mixture_resumes_at_another_world_size(ranks: RankPool, tmp_path: Path) -> None:
    write_tokens_of(tmp_path / "tokens", [10, 10])
    whole = ranks.run(train_mixture, world_size=1, args=(tmp_path, None))[0]
    assert sum(sample >= 1000 for sample in whole) == pytest.approx(12, abs=2)
    rest = ranks.run(train_mixture, world_size=2, args=(tmp_path, 5))
    assert sorted(rest[0] + rest[1]) == sorted(whole[20:])


# -- starts and ends --------------------------------------------------------------------------------------------------

SCRIPT = Path(__file__).parent / "scripts" / "streamed.py"


@pytest.mark.parametrize(
    "strategy", ["hierdist_spawn", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("hierdist", "ddp_spawn"))]
)
def test_started_ranks_read_each_sample_once_and_leave_no_reader(strategy: str) -> None:
    printed = run_script([SCRIPT, strategy], deadline_s=100).check().stdout
    trained = [sample for found in re.findall(r"trained on \[(.*)\]", printed) for sample in found.split(", ")]
    assert sorted(map(int, trained)) == list(range(13))


@pytest.mark.sweep
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_readers_may_be_processes_that_are_started_anew(tmp_path: Path, method: str) -> None:
    folder = write_tokens_of(tmp_path / "data", [6, 6])
    printed = run_script([SCRIPT.with_name("spawned_readers.py"), method, str(folder)], deadline_s=150).check().stdout
    assert printed.count(f"read {list(range(0, 24, 2))}") == 2, printed
    assert "left []" in printed


class Fatal(Ids):
    """Kills whoever reads sample 9."""

    def __getitem__(self, index: int) -> int:
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def read_by_a_killed_process(context: RankContext) -> dict[str, Any]:
    """How a fit ends if a process that reads is killed."""
    data = ShardedDataModule(Fatal(16), config={"batch_size": 2, "workers": 1, "readers": "processes"})
    trainer = trainer_on_pool(context, strategy_of(sync={"timeout_s": 10.0}))
    return ending_of_fit(trainer, Logging(), None, None, data)


def test_a_killed_reader_ends_the_run_on_all_ranks(ranks: RankPool) -> None:
    got = ranks.run(read_by_a_killed_process, world_size=2, fresh=True, deadline_s=40)
    assert all(ending["text"] for ending in got)
    said = r"a process that reads data has ended|DataLoader worker \(pid"  # torch may say it at any time, by a signal
    assert any(re.search(said, ending["trace"]) for ending in got)


def refuse(context: RankContext, what: str) -> tuple[str, int]:
    """What is said, and how many steps were made before."""
    data: dict[str, Any] = {"few": Ids(1), "none": Ids(0), "missing": context.tmp_path / "nowhere"}
    module = Logging(lambda: ShardedLoader(data[what], config=DataConfig(batch_size=2)))
    trainer = trainer_on_pool(context, strategy_of())
    return ending_of_fit(trainer, module)["text"], trainer.global_step


@pytest.mark.parametrize(
    ("what", "said"), [("few", "1 samples are less than one batch"), ("none", "no samples"), ("missing", "nowhere")]
)
def test_what_cannot_work_ends_before_training(ranks: RankPool, what: str, said: str) -> None:
    for text, steps in ranks.run(refuse, world_size=2, args=(what,), fresh=True):
        assert said in text
        assert steps == 0


def count_bytes(context: RankContext, folder: Path) -> dict[str, float]:
    """What reading from a store counts in a fit of two epochs; the store is in each rank's memory."""
    store = fsspec.filesystem("memory")
    for path in (folder / "data").iterdir():
        store.pipe(f"/data/{path.name}", path.read_bytes())
    options = {"batch_size": 2, "lanes": 2, "shuffle_block": 4, "last_batch": "short", "cache_dir": str(folder / "c")}
    strategy = strategy_of()
    data = ShardedDataModule("memory://data", config=options)
    trainer_on_pool(context, strategy, max_epochs=2).fit(Logging(), datamodule=data)
    store.rm("/data", recursive=True)
    counted: dict[str, float] = Counter()
    for event in strategy.events.snapshot():
        counted[event.name] += event.attributes["samples"] if event.name == "data.wait" else event.value
    return {name: value for name, value in counted.items() if name.startswith("data.")}


def test_what_is_read_is_counted(ranks: RankPool, tmp_path: Path) -> None:
    write_tokens_of(tmp_path / "data", [24, 24], chunk_windows=8)
    got = ranks.run(count_bytes, world_size=2, args=(tmp_path,))
    size = TokensFormat().index(open_read_folder(tmp_path / "data")).size_bytes  # chunks share a token
    assert [counted["data.wait"] for counted in got] == [48, 48]
    shared = sum(counted.get("data.shared_bytes", 0) for counted in got)
    assert size <= shared <= 1.02 * size, "a host's ranks read each chunk once, and nothing in the second epoch"
    assert sum(counted.get("data.cache_bytes", 0) for counted in got) > 0
