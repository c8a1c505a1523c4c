"""Ranks lost while a checkpoint is read once per host: those that wait for what they read end, and name them."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_dist.checkpoint.local_disk import LocalFolder
from lightning_dist.errors import CheckpointError
from tests.distributed import test_host_reading as once
from tests.distributed.lightning_runs import OddModule, adamw, loader_of, make_batches
from tests.faults.fits import ending_of_fit
from tests.faults.test_checkpoint_failures import PATIENT_S, TIMEOUT_S
from tests.support.faults import InjectedError
from tests.support.ranks import Died, RankPool
from tests.support.tasks import RankContext

ONE_HOST = {"a": [0, 1]}
TWO_HOSTS = {"a": [0, 1], "b": [2]}


def _resume(context: RankContext, path: str, *callbacks: pl.Callback, **sync: Any) -> dict[str, Any]:
    batches = loader_of(make_batches(context.world_size, 2)[context.rank])
    trainer = once._trainer(context, "ddp", 2, *callbacks, **sync)
    return ending_of_fit(trainer, OddModule(adamw, once.wide_model), batches, None, None, path)


def die_reading(context: RankContext, path: str, shared_memory: str) -> dict[str, Any]:
    def die(folder: LocalFolder, name: str, size_bytes: int) -> None:
        if context.rank == 1 and name.endswith(".bin"):
            os.kill(os.getpid(), signal.SIGKILL)

    with once.reading(die):
        return _resume(context, path, timeout_s=PATIENT_S, shared_memory=shared_memory)


@pytest.mark.parametrize("shared_memory", ["auto", pytest.param("off", marks=pytest.mark.sweep)])
def test_a_rank_killed_while_it_reads_for_its_host_is_named(
    ranks: RankPool, tmp_path: Path, shared_memory: str
) -> None:
    path = str(tmp_path / "a.ckpt")
    ranks.run(once.save, layout=TWO_HOSTS, args=(path, "ddp"))
    ended = ranks.run(die_reading, layout=TWO_HOSTS, args=(path, shared_memory), init_group=False, may_die=[1])
    assert isinstance(ended[1], Died)
    for other in (ended[0], ended[2]):
        assert other["is_ours"], other
        assert "rank 1 (host a)" in other["text"], other["text"]


def get_stuck(context: RankContext, path: str) -> dict[str, Any]:
    is_over = threading.Event()

    def wait(folder: LocalFolder, name: str, size_bytes: int) -> None:
        if context.rank == 1 and name.endswith(".bin"):
            is_over.wait(3 * TIMEOUT_S)

    with once.reading(wait):
        return _resume(context, path, timeout_s=TIMEOUT_S)


def test_a_rank_that_storage_does_not_answer_is_named(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    ranks.run(once.save, layout=ONE_HOST, args=(path, "ddp"))
    ended = ranks.run(get_stuck, layout=ONE_HOST, args=(path,), init_group=False, fresh=True)
    assert ended[0]["is_ours"], ended[0]
    assert "take on group 'reading'" in ended[0]["text"]
    assert "rank 1 (host a)" in ended[0]["text"], ended[0]["text"]
    assert ended[1]["is_ours"], ended[1]


class EndInSetup(pl.Callback):
    """One rank dies, or raises, before it loads."""

    def __init__(self, rank: int, dies: bool) -> None:
        self.rank = rank
        self.dies = dies

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.global_rank != self.rank:
            return
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        raise InjectedError("the user's own")


def end_before(context: RankContext, path: str, dies: bool) -> dict[str, Any]:
    return _resume(context, path, EndInSetup(1, dies), timeout_s=PATIENT_S)


@pytest.mark.parametrize("dies", [True, False])
def test_a_rank_that_does_not_come_to_read_is_named_at_once(ranks: RankPool, tmp_path: Path, dies: bool) -> None:
    path = str(tmp_path / "a.ckpt")
    ranks.run(once.save, layout=ONE_HOST, args=(path, "ddp"))
    ended = ranks.run(end_before, layout=ONE_HOST, args=(path, dies), init_group=False, fresh=True, may_die=[1])
    assert isinstance(ended[1], Died) == dies
    assert ended[0]["is_ours"], ended[0]
    assert "rank 1 (host a)" in ended[0]["text"], ended[0]["text"]
    assert dies or "the user's own" in ended[0]["text"], ended[0]["text"]


def look_elsewhere(context: RankContext, path: str) -> tuple[str, str]:
    trainer = once._trainer(context, "ddp", 2)
    with pytest.raises(CheckpointError) as caught:
        once._fit(context, trainer, path if context.rank else path.replace("a.ckpt", "elsewhere/a.ckpt"))
    return type(caught.value).__name__, str(caught.value)


def test_ranks_that_see_different_storage_are_told(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    ranks.run(once.save, layout=ONE_HOST, args=(path, "ddp"))
    for _, text in ranks.run(look_elsewhere, layout=ONE_HOST, args=(path,)):
        assert text.startswith("of 2 ranks only 1 see a sharded checkpoint at ")
