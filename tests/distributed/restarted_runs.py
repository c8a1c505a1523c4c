"""Fits that are started, killed, and started again, as an agent would: by variables and a folder."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dist import AsyncShardedCheckpoint
from lightning_dist.build import checkpoints
from lightning_dist.build.checkpoints import CheckpointSaver
from lightning_dist.build.writer import Writer
from lightning_dist.elastic.detect.board import FILE, Board
from tests.distributed.lightning_runs import (
    OddModule,
    adamw,
    loader_of,
    make_batches,
    mse,
    strategy_of,
    trainer_on_pool,
)
from tests.support.tasks import RankContext

STEPS = 8
MEMORY = {"mode": "sharded", "replica": "memory", "replica_limit": "64MB", "memory_every_n_steps": 2}


@dataclass(frozen=True)
class Start:
    """One start of a run.

    Attributes:
        folder: Of the run.
        round: From 1.
        killed_at: Kill all ranks after this step.
        killed_in: So many passes of the next step are done by then.
        awaits: Before that, wait until what is being written is there; without it, memory has it once training waits
            for it, and storage never.
        parallel: The strategy's mode.
        checkpoint: The strategy's option.
        sync: The same.
        saves_every: Steps between two saves into storage.
        names_folder: Whether the script says where checkpoints go.
        ckpt_path: Where the script asks to begin.
        run: The run's name.
        others: More of the Trainer's arguments.
    """

    folder: Path
    round: int = 1
    killed_at: int | None = None
    killed_in: int = 0
    awaits: bool = True
    parallel: Any = "ddp"
    checkpoint: Any = field(default_factory=lambda: dict(MEMORY))
    sync: dict[str, Any] = field(default_factory=dict)
    saves_every: int = 100
    names_folder: bool = True
    ckpt_path: str | None = None
    run: str = "a-run"
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def checkpoints(self) -> Path:
        """Where they go, if the script says so."""
        return self.folder / "checkpoints"

    @property
    def agent(self) -> Path:
        """The agent's folder."""
        return self.folder / "agent"


class ByStep(OddModule):
    """Its batch follows from step and rank alone, whatever loader there is."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        own = make_batches(self.trainer.world_size, 1, seed=self.trainer.global_step)[self.trainer.global_rank][0]
        loss = mse(self.net, own)
        self.losses.append(float(loss.detach()))
        return loss


class KilledAt(pl.Callback):
    """Ends the process after a step, and some passes of the next one."""

    def __init__(self, step: int | None, passes: int = 0, *, awaits: bool = True) -> None:
        self._step = step
        self._passes = passes
        self._awaits = awaits

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step != self._step:
            return
        self._passes -= 1
        if self._passes < 0:
            if trainer.strategy._saver is not None and self._awaits:
                trainer.strategy._saver.finish()
            trainer.strategy.barrier()  # all have
            os.kill(os.getpid(), signal.SIGKILL)


class FirstStep(pl.Callback):
    """Notes the step that training begins after."""

    step = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.step = trainer.global_step


@contextlib.contextmanager
def written_when_awaited() -> Iterator[None]:
    """Inside, what goes to memory is not written before training waits for it, and storage never has it."""
    is_awaited = threading.Event()
    keep, await_memory = Writer.keep, CheckpointSaver.await_memory

    def keep_later(self: Writer, *args: Any) -> bool:
        assert is_awaited.wait(60), "nobody waits"
        is_awaited.clear()
        return keep(self, *args)

    def hang() -> None:
        threading.Event().wait()

    def awaiting(self: CheckpointSaver, timeout_s: float) -> bool:
        is_awaited.set()
        return await_memory(self, 60)

    with (
        patch.object(Writer, "keep", keep_later),
        patch.object(CheckpointSaver, "await_memory", awaiting),
        patch.object(checkpoints, "stand_back", hang),  # which is what comes before storage
    ):
        yield


def prepare(start: Start) -> Start:
    """What an agent does first: make its folder, and a board for up to four ranks."""
    start.agent.mkdir(parents=True, mode=0o700)
    Board.create(start.agent / FILE, 4).close()
    return start


@contextlib.contextmanager
def started(start: Start) -> Iterator[None]:
    """Inside, the variables are those that an agent sets."""
    variables = {"HIERDIST_RUN": start.run, "HIERDIST_ROUND": str(start.round), "HIERDIST_AGENT": str(start.agent)}
    with patch.dict(os.environ, variables):
        yield


def fit(context: RankContext, start: Start, *callbacks: pl.Callback) -> tuple[int, dict[str, torch.Tensor]]:
    """Train to the end; the step it began after, and the weights it ended with."""
    with started(start), contextlib.nullcontext() if start.awaits else written_when_awaited():
        strategy = strategy_of(parallel=start.parallel, checkpoint=start.checkpoint, sync=start.sync)
        is_full = start.checkpoint == "full"
        kind = ModelCheckpoint if is_full else AsyncShardedCheckpoint
        saving = kind(
            start.checkpoints if start.names_folder else None,
            every_n_train_steps=start.saves_every,
            save_top_k=-1,
            filename="{step}",
        )
        first = FirstStep()
        trainer = trainer_on_pool(
            context,
            strategy,
            callbacks=[saving, first, KilledAt(start.killed_at, awaits=start.awaits), *callbacks],
            enable_checkpointing=True,
            default_root_dir=start.folder,
            max_epochs=-1,
            max_steps=STEPS,
            **start.others,
        )
        module = ByStep(adamw)
        trainer.fit(module, loader_of(make_batches(1, 9)[0]), ckpt_path=start.ckpt_path)
        return first.step, {name: value.detach().clone() for name, value in module.state_dict().items()}
