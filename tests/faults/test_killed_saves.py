"""A process that is killed anywhere in a save leaves the last committed checkpoint, whole."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dist.checkpoint import catalog, local_disk
from lightning_dist.checkpoint.storage import open_folder
from tests.support.ranks import Died, RankPool
from tests.support.saves import load_on_rank, save_by_ranks
from tests.support.tasks import RankContext

CALLS = ("open", "writev", "fsync", "close", "replace", "rmdir")


def save_steps(root: Path, first: int, count: int) -> None:
    """Steps into folders of their own, and each over ``last`` too; every value is its step's number."""
    for step in range(first, first + count):
        state = {"w": torch.full((50, 3), float(step)), "b": torch.full((5,), step), "loops": {"step": step}}
        for name in (f"step{step}", "last"):
            save_by_ranks(
                [{**state}] * 2, open_folder(root / name), chunk_bytes=200, record={"step": step}, created_s=float(step)
            )


def in_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def kill_at_call(number: int, *, counts: Callable[[], bool] = lambda: True) -> None:
    """End this process by SIGKILL just before the call of that number to the disk, of those that count."""
    left = [number]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **options: Any) -> Any:
            left[0] -= counts()
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return counting

    for name in CALLS:
        setattr(local_disk.os, name, counted(getattr(os, name)))
    for name in ("unlink", "mkdir"):
        setattr(Path, name, counted(getattr(Path, name)))


def problems_of(root: Path, least: int) -> list[str]:
    """What is wrong with what a kill left: each checkpoint is whole or not committed, the newest is new enough, and the
    one that is saved over again and again is there.
    """
    folder = open_folder(root)
    problems = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        newest = catalog.newest(folder, full=True)
    if newest is None or newest.manifest.record["step"] < least:
        problems.append(f"the newest is {newest and newest.manifest.record}, not {least} or later")
    for entry in catalog.survey(folder, full=True):
        if entry.checkpoint is None:
            problems += [f"{entry.name}: {entry.problem}"] if entry.name == "last" else []
            continue
        if entry.problem is not None:
            problems.append(str(entry.problem))
            continue
        step = entry.checkpoint.manifest.record["step"]
        target = {"w": torch.zeros(50, 3), "b": torch.zeros(5, dtype=torch.int64), "loops": None}
        load_on_rank(target, entry.folder)
        if not (target["w"] == step).all() or not (target["b"] == step).all() or target["loops"] != {"step": step}:
            problems.append(f"{entry.name} holds other values than those of step {step}")
    return problems


def kill_everywhere(context: RankContext, root: Path, stride: int) -> tuple[int, list[str]]:
    """A save of one step over an older one, killed before each of its calls in turn."""
    kills, number = 0, 1
    while True:
        place = root / f"at{number}"
        save_steps(place, 1, 1)

        def work(number: int = number, place: Path = place) -> None:
            kill_at_call(number)
            save_steps(place, 2, 1)

        _, status = os.waitpid(in_child(work), 0)
        problems = problems_of(place, 2 if status == 0 else 1)
        if problems or status == 0:
            return kills, problems
        if os.WTERMSIG(status) != signal.SIGKILL:
            return kills, [f"status {status}"]
        kills, number = kills + 1, number + stride


def kill_at_random(context: RankContext, root: Path, count: int) -> list[str]:
    """Kills at any moment, in the kernel too; each save goes on where the last was killed."""
    rng, step = random.Random(7), 1
    save_steps(root, step, 1)
    for _ in range(count):
        pid = in_child(lambda step=step: save_steps(root, step + 1, 10_000))  # type: ignore[misc]
        time.sleep(rng.uniform(0.0, 0.03))  # the moment of the kill is what the test varies
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        problems = problems_of(root, step)
        if problems:
            return problems
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            newest = catalog.newest(open_folder(root))
        assert newest is not None
        step = newest.manifest.record["step"]
        for entry in catalog.survey(open_folder(root)):
            if entry.name not in (f"step{step}", "last"):
                catalog.delete(open_folder(root), entry.name)
    return []


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.sweep)])
def test_killed_before_any_call_to_the_disk(ranks: RankPool, tmp_path: Path, stride: int) -> None:
    kills, problems = ranks.run(
        kill_everywhere, world_size=1, args=(tmp_path, stride), init_group=False, fresh=True, deadline_s=100
    )[0]
    assert problems == []
    assert kills >= 60 // stride


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=[pytest.mark.sweep, pytest.mark.timeout(600)])])
def test_killed_at_any_moment(ranks: RankPool, tmp_path: Path, count: int) -> None:
    assert ranks.run(
        kill_at_random, world_size=1, args=(tmp_path, count), init_group=False, fresh=True, deadline_s=60 + count / 2
    ) == [[]]


def killed_rank(context: RankContext, root: Path, call: str) -> str:
    from lightning_dist.checkpoint import sharded
    from lightning_dist.errors import CheckpointError

    def save(step: int) -> None:
        state = {"w": torch.full((1000,), float(step))}
        folder = open_folder(root / f"step{step}")
        sharded.save(state, folder, rank=context.rank, host="h", record={"step": step}, chunk_bytes=1000)

    save(1)
    if context.rank == 1:
        true_call = getattr(os, call)

        def kill(*arguments: Any) -> Any:
            true_call(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(local_disk.os, call, kill)
    with contextlib.suppress(CheckpointError, RuntimeError):
        save(2)
    return "ended"


@pytest.mark.parametrize("call", ["writev", "fsync"])
def test_a_rank_that_is_killed_commits_nothing(ranks: RankPool, tmp_path: Path, call: str) -> None:
    results = ranks.run(killed_rank, world_size=2, args=(tmp_path, call), may_die=[1], group_timeout_s=20)
    assert results[0] == "ended"
    assert isinstance(results[1], Died)
    assert not (tmp_path / "step2/COMMITTED").exists()
    with pytest.warns(UserWarning, match="step2 has no COMMITTED"):
        newest = catalog.newest(open_folder(tmp_path), full=True)
    assert newest is not None
    assert newest.manifest.record == {"step": 1}
