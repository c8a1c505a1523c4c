"""A scheduler's signals while a checkpoint is being written: the newest whole one goes on, no other is taken for it."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_dist import AsyncShardedCheckpoint
from lightning_dist.checkpoint import catalog
from lightning_dist.checkpoint.local_disk import LocalFolder
from lightning_dist.checkpoint.manifest import MARKER_FILE
from lightning_dist.checkpoint.storage import open_folder
from tests.distributed.lightning_runs import PoolEnvironment, strategy_of, trainer_on_pool
from tests.distributed.pipeline_runs import STEPS, StageCase, StageLearner
from tests.distributed.test_checkpoint_use import SaveEachStep, writing
from tests.faults.test_checkpoint_failures import whole_in
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

TIMEOUT_S = 3.0
CASE = StageCase(optimizer="adamw")


def _left() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("hierdist")]


# -- SIGTERM -----------------------------------------------------------------------------------------------------------


def terminate_in_a_save(
    context: RankContext, folder: str, how: str, signalled: list[int], is_held: bool
) -> dict[str, Any]:
    """The second checkpoint's write sends the signal; held up, it does not end before the fit has."""
    checkpoint = {"mode": "async_sharded", "timeout_s": TIMEOUT_S if is_held else 20.0}
    keep = {
        "callback": lambda: AsyncShardedCheckpoint(
            folder, filename="{step}", every_n_train_steps=STEPS, save_top_k=-1, save_last=True, checkpoint=checkpoint
        ),
        "strategy": lambda: ModelCheckpoint(folder, filename="{step}", every_n_train_steps=STEPS, save_top_k=-1),
    }
    go_on, sent = threading.Event(), threading.Event()

    def terminate(place: LocalFolder, name: str) -> None:
        if place.url.endswith("step=8.ckpt") and name.startswith("rank"):
            if context.rank in signalled and not sent.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
            sent.set()
            go_on.wait(60 if is_held else 0.2)

    class Wait(pl.Callback):
        """The next save would wait for the one that is held up: the signal comes long before."""

        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 2 * STEPS:
                sent.wait(15)

    def trainer(epochs: int) -> pl.Trainer:
        strategy: Any = DDPStrategy()
        if how != "lightning":
            strategy = strategy_of(parallel="zero2", checkpoint=checkpoint if how == "strategy" else "full")
        callback = keep["strategy" if how == "strategy" else "callback"]()
        return trainer_on_pool(
            context,
            strategy,
            callbacks=[callback, Wait()],
            limit_val_batches=0,
            max_epochs=epochs,
            enable_checkpointing=True,
        )

    said = ""
    before = signal.getsignal(signal.SIGTERM)
    with writing(terminate):
        try:
            trainer(100).fit(StageLearner(CASE))
        except SIGTERMException as error:
            said = f"SIGTERM {error}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
    there, threads = whole_in(Path(folder)), _left()
    go_on.set()
    for each in threading.enumerate():
        if each.name.startswith("hierdist-checkpoint"):
            each.join(30)
    sent.set()
    resumed = trainer(4)
    newest = catalog.newest(open_folder(folder))
    assert newest is not None
    resumed.fit(StageLearner(CASE), ckpt_path=newest.folder.url)
    restored = signal.getsignal(signal.SIGTERM) is before
    return {"said": said, "there": there, "threads": threads, "step": resumed.global_step, "restored": restored}


TERMINATIONS = {
    "callback, both": (2, "callback", [0, 1], False),
    "callback, rank 1": (2, "callback", [1], False),
    "callback, rank 0, held": (2, "callback", [0], True),
    "strategy, rank 0": (2, "strategy", [0], False),
    "strategy, rank 1, held": (2, "strategy", [1], True),
    "alone": (1, "strategy", [0], False),
    "ddp": (1, "lightning", [0], False),
    "ddp, held": (1, "lightning", [0], True),
}


@pytest.mark.filterwarnings("ignore:the last checkpoint was not written", "ignore:nothing was saved before stopping")
@pytest.mark.parametrize(
    ("world_size", "how", "signalled", "is_held"),
    sampled(TERMINATIONS, always=["callback, both", "strategy, rank 1, held", "alone", "ddp"]),
)
def test_sigterm_in_a_save_ends_the_fit_and_the_newest_whole_one_goes_on(
    ranks: RankPool, tmp_path: Path, world_size: int, how: str, signalled: list[int], is_held: bool
) -> None:
    for ended in ranks.run(
        terminate_in_a_save, world_size=world_size, args=(str(tmp_path), how, signalled, is_held), fresh=True
    ):
        assert ended["said"].startswith("SIGTERM"), ended
        steps = [name for name in ended["there"] if name.startswith("step=")]
        left = [name for name in ended["there"] if name.startswith("interrupted")]
        assert len(left) == (0 if is_held or how == "lightning" else 1), ended
        assert steps == (["step=4.ckpt"] if is_held else ["step=4.ckpt", "step=8.ckpt"]), ended
        assert ended["threads"] == (["hierdist-checkpoint"] if is_held else []), ended
        assert ended["step"] == 4 * STEPS
        assert ended["restored"]


# -- SLURM -------------------------------------------------------------------------------------------------------------


class Slurm(SLURMEnvironment):
    """A job of SLURM's whose ranks are those of the pool."""

    def __init__(self) -> None:
        self.pool = PoolEnvironment()
        super().__init__(auto_requeue=True, requeue_signal=signal.SIGUSR2)

    def world_size(self) -> int:
        return self.pool.world_size()

    def global_rank(self) -> int:
        return self.pool.global_rank()

    def local_rank(self) -> int:
        return self.pool.local_rank()

    def node_rank(self) -> int:
        return 0

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """The pool's ranks are as they are."""


SCONTROL = """#!/bin/sh
echo "$@" $(cd {folder}; ls -d hpc_ckpt_*/COMMITTED) >> {folder}/scontrol.log
"""


def preempt_in_a_save(context: RankContext, folder: str, parallel: str, fails: bool) -> dict[str, Any]:
    """Each rank is sent the signal by its write of the first checkpoint; a fit, and the one that is queued again."""
    Path(folder, "bin").mkdir(exist_ok=True)
    scontrol = Path(folder, "bin/scontrol")
    if context.rank == 0:
        scontrol.write_text(SCONTROL.format(folder=folder))
        scontrol.chmod(0o755)
    os.environ.update(PATH=f"{folder}/bin:{os.environ['PATH']}", SLURM_JOB_ID="7")
    sent: list[int] = []

    def preempt(place: LocalFolder, name: str) -> None:
        if place.url.endswith("/1.ckpt") and name.startswith("rank") and not sent:
            sent.append(1)
            threading.Event().wait(0.1 * context.rank)  # one after another
            os.kill(os.getpid(), signal.SIGUSR2)
        if fails and "hpc" in place.url and name == MARKER_FILE:
            raise OSError(28, "No space left on device")

    def trainer(epochs: int, *callbacks: pl.Callback) -> pl.Trainer:
        checkpoint = {"mode": "async_sharded", "when_busy": "skip" if fails else "wait", "on_failure": "warn"}
        return trainer_on_pool(
            context,
            strategy_of(parallel=parallel, checkpoint=checkpoint),
            plugins=[Slurm()],
            callbacks=list(callbacks),
            default_root_dir=folder,
            max_epochs=epochs,
            limit_val_batches=0,
        )

    first = trainer(2, SaveEachStep(Path(folder)))
    with writing(preempt):
        first.fit(StageLearner(CASE))
    found = first._checkpoint_connector._hpc_resume_path
    second = trainer(3)
    second.fit(StageLearner(CASE), ckpt_path="hpc" if found else f"{folder}/1.ckpt")
    return {"first": first.global_step, "second": second.global_step, "found": found, "threads": _left()}


PREEMPTIONS = {
    "two ranks": (2, "zero2", False),
    "one rank": (1, "ddp", False),
    "cannot be written": (2, "ddp", True),
}


@pytest.mark.filterwarnings("ignore:a checkpoint could not be written")
@pytest.mark.parametrize(("world_size", "parallel", "fails"), sampled(PREEMPTIONS, always=PREEMPTIONS))
def test_a_preempted_job_saves_once_and_is_queued_once_that_is_whole(
    ranks: RankPool, tmp_path: Path, world_size: int, parallel: str, fails: bool
) -> None:
    for ended in ranks.run(preempt_in_a_save, world_size=world_size, args=(str(tmp_path), parallel, fails), fresh=True):
        assert ended["first"] == 2 * STEPS
        assert ended["second"] == 3 * STEPS
        assert ended["found"] == (None if fails else f"{tmp_path}/hpc_ckpt_1.ckpt")
        assert ended["threads"] == []
    asked = (tmp_path / "scontrol.log").read_text().splitlines()
    assert asked == ["requeue 7" if fails else "requeue 7 hpc_ckpt_1.ckpt/COMMITTED"]
    assert [path.name for path in tmp_path.glob("hpc_ckpt_*")] == ([] if fails else ["hpc_ckpt_1.ckpt"])
    if not fails:
        catalog.open_checkpoint(open_folder(tmp_path / "hpc_ckpt_1.ckpt"), full=True)
