"""Fits that are killed anywhere in their saves: the next one goes on from the newest committed checkpoint, whole."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import random
import select
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_dist.checkpoint import catalog
from lightning_dist.checkpoint.save_ids import save_id_of
from lightning_dist.checkpoint.storage import Folder, open_folder
from lightning_dist.checkpoint.whole import read_all
from lightning_dist.errors import HierDistError
from tests.distributed.lightning_runs import (
    ListDataset,
    OddModule,
    adamw,
    loader_of,
    make_batches,
    strategy_of,
    trainer_on_pool,
)
from tests.faults.test_killed_saves import kill_at_call
from tests.support.placement import Placement
from tests.support.processes import free_port
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext
from tests.support.tied import tie_to_parent

BATCHES = 1_000_000
DEADLINE_S = 60.0  # in which a rank whose peer is killed ends
LOST, WRONG, BROKEN = 3, 9, 70  # exit statuses: by an error of ours, on loading other values, by anything else
CALLS_OF_RANK = (200, 60)  # a save of rank 0 makes some 40 calls to the disk, of another rank some 10


class SaveOverAndOver(pl.Callback):
    """Makes all values the number of the step, saves them by that name and as ``last``, and removes older ones.

    Args:
        folder: Where to.
        began: Descriptor that gets a byte when the first save begins.
    """

    def __init__(self, folder: Path, began: int) -> None:
        self.folder = folder
        self.began = began
        self.started: list[tuple[str, int]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step and any(bool((value != trainer.global_step).any()) for value in _values(trainer)):
            os._exit(WRONG)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        for value in _values(trainer):
            value.fill_(step)
        for name in (f"step={step}.ckpt", "last.ckpt"):
            if not self.started:
                os.write(self.began, b".")
            trainer.save_checkpoint(self.folder / name)
            if self.started and trainer.is_global_zero:  # the one before is committed, or this had raised
                with open(self.folder / "committed", "a") as file:
                    file.write("{} {}\n".format(*self.started[-1]))
            self.started.append((name, step))
        trainer.strategy.remove_checkpoint(self.folder / f"step={step - 3}.ckpt")


def _values(trainer: pl.Trainer) -> Iterator[torch.Tensor]:
    """Of this rank: weights, and what the optimizer holds of them."""
    optimizer = trainer.optimizers[0]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for value in (parameter, *optimizer.state[parameter].values()):
                yield value.detach().to_local() if isinstance(value, DTensor) else value.detach()


def fit(context: RankContext, folder: Path, began: int) -> int:
    """Until a rank is killed."""
    warnings.simplefilter("ignore")
    newest = catalog.newest(open_folder(folder))
    strategy = strategy_of(parallel="zero2" if context.world_size > 1 else "ddp", checkpoint="async_sharded")
    callbacks = [SaveOverAndOver(folder, began)]
    trainer = trainer_on_pool(context, strategy, callbacks=callbacks, limit_val_batches=0, max_epochs=-1)
    batch = make_batches(context.world_size, 1)[context.rank][0]
    loader: DataLoader[Any] = loader_of([batch] * BATCHES)
    assert isinstance(loader.dataset, ListDataset)
    try:
        trainer.fit(OddModule(adamw), loader, ckpt_path=None if newest is None else newest.folder.url)
    except HierDistError:
        return LOST
    return BROKEN


@dataclass(frozen=True)
class Kill:
    """Whom, and when: after so many seconds in which saves are made, or before a call to the disk of that number."""

    ranks: tuple[int, ...]
    after_s: float | None
    at_call: int | None

    @classmethod
    def drawn(cls, rng: random.Random, world_size: int) -> Kill:
        """Any of them."""
        alone = [(rank,) for rank in range(world_size)]
        ranks = rng.choice([*alone, tuple(range(world_size))] if world_size > 1 else alone)
        if rng.random() < 0.5:
            return cls(ranks, rng.uniform(0.0, 0.2), None)
        return cls(ranks, None, rng.randrange(1, CALLS_OF_RANK[min(ranks)]))

    def __str__(self) -> str:
        who = " and ".join(f"rank {rank}" for rank in self.ranks)
        return f"{who}, {'at any moment' if self.at_call is None else 'before a call to the disk'}"


@dataclass
class Killed:
    """What came of kills."""

    kills: dict[str, int] = field(default_factory=collections.Counter)
    cut_off: int = 0
    survivors: int = 0
    newest_step: int = 0
    last_step: int = 0
    problems: list[str] = field(default_factory=list)


def kill_fits(context: RankContext, root: Path, world_size: int, count: int) -> Killed:
    """Fits one after another, each from where the one before was killed; each rank of the pool has fits of its own."""
    rng, killed, folder = random.Random(context.rank), Killed(), root / str(context.rank)
    folder.mkdir()
    for _ in range(count // context.world_size):
        kill = Kill.drawn(rng, world_size)
        statuses = _killed_fit(folder, world_size, kill)
        named = f"{world_size} rank{'s' * (world_size > 1)}: {kill}"
        killed.kills[named] += 1
        for rank, status in enumerate(statuses):
            killed.survivors += status == LOST
            expected = (-signal.SIGKILL,) if rank in kill.ranks else (LOST,)
            if kill.at_call is not None and len(kill.ranks) > 1:  # the other may have been lost first
                expected = (-signal.SIGKILL, LOST)
            if status not in expected:
                killed.problems.append(f"{named}: rank {rank} ended with {status}")
        killed.problems += [f"{named}: {problem}" for problem in _problems_left(folder, killed)]
        if killed.problems:
            break
    return killed


def _killed_fit(folder: Path, world_size: int, kill: Kill) -> list[int]:
    """How its ranks ended: exit status, or less than zero the signal."""
    began, begin = os.pipe()
    port = free_port()
    pids = [
        _forked(functools.partial(_run_rank, folder, rank, world_size, port, begin, kill)) for rank in range(world_size)
    ]
    os.close(begin)
    try:
        if kill.after_s is not None:
            select.select([began], [], [], DEADLINE_S)
            time.sleep(kill.after_s)  # the moment of the kill is what the test varies
            for rank in kill.ranks:
                os.kill(pids[rank], signal.SIGKILL)
        end_s = time.monotonic() + DEADLINE_S
        return [_status_of(pid, end_s) for pid in pids]
    finally:
        os.close(began)


def _forked(work: Callable[[], int]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = BROKEN
        try:
            tie_to_parent(parent)
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def _status_of(pid: int, end_s: float) -> int:
    while time.monotonic() < end_s:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGABRT)  # shows its stacks
    with contextlib.suppress(ProcessLookupError):
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -signal.SIGABRT


def _run_rank(folder: Path, rank: int, world_size: int, port: int, begin: int, kill: Kill) -> int:
    placement = Placement.of(world_size)
    seat = next(seat for seat in placement.seats() if seat.rank == rank)
    os.environ.update({**seat.environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    context = RankContext(rank, world_size, seat.host, rank, world_size, 0, placement, folder, DEADLINE_S)
    if kill.at_call is not None and rank in kill.ranks:
        kill_at_call(kill.at_call, counts=lambda: threading.current_thread().name.startswith("hierdist-checkpoint"))
    return fit(context, folder, begin)


def _problems_left(folder: Path, killed: Killed) -> list[str]:
    """What is wrong with what a kill left; notes how far the fit has come."""
    problems = []
    noted = folder / "committed"
    lines = [line.split() for line in noted.read_text().splitlines()] if noted.exists() else []
    noted.unlink(missing_ok=True)
    killed.newest_step = max([killed.newest_step, *(int(step) for _, step in lines)])
    killed.last_step = max([killed.last_step, *(int(step) for name, step in lines if name == "last.ckpt")])
    found = catalog.survey(open_folder(folder), full=True)
    killed.cut_off += any(_has_leftovers(entry.folder) for entry in found)
    steps: dict[str, int] = {}
    for entry in found:
        if entry.checkpoint is None:
            continue
        if entry.problem is not None:
            problems.append(str(entry.problem))
            continue
        step = steps[entry.name] = entry.checkpoint.manifest.record["step"]
        tensors = read_all(entry.checkpoint, entry.checkpoint.manifest.tensors)
        wrong = [name for name, value in tensors.items() if bool((value != step).any())]
        if wrong or not tensors:
            problems.append(f"{entry.name} holds other values than those of step {step}: {wrong}")
    newest, last = max(steps.values(), default=0), steps.get("last.ckpt", 0)
    if newest < killed.newest_step or last < killed.last_step:  # what is saved over is there all the time
        problems.append(f"the newest is of step {newest}, the last of {last}; {killed} were committed")
    killed.newest_step, killed.last_step = newest, last
    return problems


def _has_leftovers(folder: Folder) -> bool:
    """Whether there are files of a save that was not committed."""
    ids = {save_id_of(name) for name in folder.list()} - {None}
    return bool(ids - {catalog.committed_save(folder)})


KILLS = {
    "one": (1, 3, 1),
    "two": (2, 4, 1),
    "one, often": (1, 400, 1),
    "two, often": (2, 600, 3),
}


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("world_size", "count", "at_once"), sampled(KILLS, always=["one", "two"]))
def test_a_killed_fit_goes_on_from_the_last_that_was_committed(
    ranks: RankPool, tmp_path: Path, world_size: int, count: int, at_once: int
) -> None:
    parts = ranks.run(
        kill_fits,
        world_size=at_once,
        args=(tmp_path, world_size, count),
        init_group=False,
        fresh=True,
        deadline_s=60 + 3 * count,
    )
    kills = sum((collections.Counter(part.kills) for part in parts), collections.Counter[str]())
    print()
    for named, number in sorted(kills.items()):
        print(f"{number:5} kills; {named}")
    print(f"{sum(part.survivors for part in parts):5} ranks that were left ended by themselves with an error")
    print(f"{sum(part.cut_off for part in parts):5} times files of a save that was cut off were left")
    problems = [problem for part in parts for problem in part.problems]
    print(f"{len(problems):5} problems")
    assert problems == []
    assert kills.total() == count
