"""Faults in a Lightning Trainer that knows nothing of them, and in what it has saved."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
from lightning.pytorch.strategies import DDPStrategy

from lightning_dist import AsyncShardedCheckpoint
from lightning_dist.build.injections import KeptCheckpoints
from lightning_dist.checkpoint.catalog import survey
from lightning_dist.checkpoint.keeper import client
from lightning_dist.checkpoint.storage import open_folder
from lightning_dist.elastic.chaos.folder import HOST_VARIABLE, VARIABLE, ChaosFolder
from lightning_dist.elastic.chaos.host.refusal import Refused
from lightning_dist.elastic.chaos.plan import Plan, make_fault
from lightning_dist.errors import InjectedFaultError, StorageError
from tests.distributed.lightning_runs import OddModule, loader_of, make_batches, sgd, trainer_on_pool
from tests.support.keepers import ended
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext


def plan_folder(path: Path, *faults: dict[str, Any]) -> ChaosFolder:
    folder = ChaosFolder(path)
    folder.make(Plan(tuple(make_fault(**{"rank": 0, **fault}) for fault in faults)))
    return folder


def fit(context: RankContext, chaos: str, *callbacks: pl.Callback, **arguments: Any) -> tuple[int, int]:
    """Train; steps and batches that were done."""
    os.environ.update({VARIABLE: chaos, HOST_VARIABLE: "here"})
    module = OddModule(sgd)
    arguments = {"enable_checkpointing": bool(callbacks), **arguments}
    trainer = trainer_on_pool(context, DDPStrategy(), callbacks=list(callbacks), **arguments)
    with contextlib.suppress(InjectedFaultError):
        trainer.fit(module, loader_of(make_batches(1, 8)[0]))
    return trainer.global_step, len(module.losses)


def test_a_step_is_one_whatever_is_accumulated_and_a_fault_happens_once(ranks: RankPool, tmp_path: Path) -> None:
    folder = plan_folder(tmp_path / "chaos", {"kind": "exception", "step": 2})
    keyword = {"accumulate_grad_batches": 2}
    assert ranks.run(fit, world_size=1, args=(str(folder.path),), kwargs=keyword) == [(2, 4)]
    assert ranks.run(fit, world_size=1, args=(str(folder.path),), kwargs=keyword) == [(4, 8)]
    (line,) = folder.record()
    assert (line["what"], line["kind"], line["rank"], line["step"], line["host"]) == (
        "injected",
        "exception",
        0,
        2,
        "here",
    )


def save_on_a_full_disk(context: RankContext, folder: str, chaos: str) -> str:
    keep = AsyncShardedCheckpoint(folder, checkpoint="sharded", every_n_train_steps=1, save_top_k=-1)
    with pytest.raises(StorageError) as raised:
        fit(context, chaos, keep)
    keep = AsyncShardedCheckpoint(folder, checkpoint="sharded", every_n_train_steps=1, save_top_k=-1)
    fit(context, chaos, keep, max_steps=1)  # there is room again
    return str(raised.value)


def test_a_full_disk_ends_a_save_and_leaves_nothing_that_looks_whole(ranks: RankPool, tmp_path: Path) -> None:
    folder = plan_folder(tmp_path / "chaos", {"kind": "enospc", "step": 3})
    (said,) = ranks.run(save_on_a_full_disk, world_size=1, args=(str(tmp_path / "saved"), str(folder.path)))
    assert "No space left on device (on purpose)" in said
    whole = [found.name for found in survey(open_folder(tmp_path / "saved")) if found.problem is None]
    assert any("step=3" in name for name in whole)  # what was saved before
    assert not any("step=4" in name for name in whole)


def test_kept_checkpoints_are_torn_and_their_keeper_is_killed(tmp_path: Path) -> None:
    kept, job = KeptCheckpoints(), str(tmp_path)
    with pytest.raises(Refused, match="no process keeps checkpoints"):
        kept.tear(job)
    keeper = client.start(client.name_of(job), limit_bytes=1 << 20)
    process = psutil.Process(keeper.about()["process"])
    try:
        with pytest.raises(Refused, match="holds no committed checkpoint"):
            kept.tear(job)
        for folder in ("old", "new", "unfinished"):
            keeper.write(folder, "small", [b"1" * 10])
            keeper.write(folder, "large", [b"1" * 1000])
            if folder != "unfinished":
                keeper.write(folder, "COMMITTED", [b"{}"])
        assert "large of new has 500 of 1000 bytes" in kept.tear(job + "/")
        assert keeper.list("new") == {"small": 10, "COMMITTED": 2, "large": 500}
        assert keeper.list("old") == {"small": 10, "COMMITTED": 2, "large": 1000}
        assert f"process {process.pid}" in kept.kill(job)
    finally:
        process.kill()
        ended(process)
    with pytest.raises(Refused, match="no process keeps checkpoints"):
        kept.kill(job)
