"""Ranks lost while a checkpoint is read once per host: those that wait for what they read end, and name them."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from lightning_dist.checkpoint.local_disk import LocalFolder
from tests.distributed import test_host_reading as once
from tests.distributed.lightning_runs import OddModule, adamw, loader_of, make_batches
from tests.faults.fits import ending_of_fit
from tests.faults.test_checkpoint_failures import PATIENT_S, TIMEOUT_S
from tests.support.ranks import Died, RankPool
from tests.support.tasks import RankContext

ONE_HOST = {"a": [0, 1]}
TWO_HOSTS = {"a": [0, 1], "b": [2]}


def _resume(context: RankContext, path: str, **sync: Any) -> dict[str, Any]:
    batches = loader_of(make_batches(context.world_size, 2)[context.rank])
    trainer = once._trainer(context, "ddp", 2, **sync)
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
