"""A run, as each rank performs it: a plain Lightning training with the two callbacks."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from benchmarks.verdict.runs import BLOCKS, STAGE_BLOCKS, Run
from benchmarks.verdict.store import make_loader, noise, takes_sampler
from benchmarks.workload import Nap
from lightning_dist import ClusterMonitor, HierDistStrategy, StepTimeline
from tests.distributed.lightning_runs import trainer_on_pool
from tests.support.tasks import RankContext

WARMUP = 5  # steps whose time does not count: buckets are built anew after the first
_SAMPLE_S = 0.2  # runs last a few seconds only


@dataclass(frozen=True)
class Timed:
    """What a rank has seen with its own clock, apart from the callbacks.

    Attributes:
        step_s: Mean over the steps that count, checkpoints and all.
        compute_s: Mean of what it slept for compute.
    """

    step_s: float
    compute_s: float


class Block(nn.Module):
    """Layers, and sleep for their compute, a third of it in the forward."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        self.nap_s = 0.0  # set before each step
        self.slept_s = 0.0

    def forward(self, values: Tensor) -> Tensor:
        values = torch.tanh(self.layers(values))
        if not self.training:
            return values
        self.slept_s += self.nap_s
        if torch.is_grad_enabled() and not values.requires_grad:
            values.requires_grad_()
        napped: Tensor = Nap.apply(values, self.nap_s / 3, self.nap_s * 2 / 3)
        return napped


class SlowSGD(torch.optim.SGD):
    """Has something to do on the host in each step."""

    def __init__(self, parameters: Any, work_s: float) -> None:
        super().__init__(parameters, lr=1e-3)
        self._work_s = work_s

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        if self._work_s:
            time.sleep(self._work_s)
        return loss


class Subject(pl.LightningModule):
    """The user's module."""

    pipeline_layers = "net"

    def __init__(self, run: Run, *, rank: int) -> None:
        super().__init__()
        torch.manual_seed(run.seed)
        self.net = nn.Sequential(*(Block(run.layers, run.width) for _ in range(BLOCKS)))
        self._run = run
        self._naps = (STAGE_BLOCKS * run.micro_batches) if run.strategy == "pipeline" else BLOCKS
        self._slowdown = 1.0 + (run.slowdown if rank == run.slow_rank else 0.0)
        self._random = random.Random(f"{run.seed} compute {rank}")

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        nap_s = self._run.compute_s / self._naps * self._slowdown * noise(self._random, self._run.jitter)
        for block in self.net:
            block.nap_s = nap_s

    def pipeline_input(self, batch: Tensor) -> Tensor:
        return batch[:, : self._run.width]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch[:, : self._run.width]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SlowSGD(self.parameters(), self._run.optimizer_s)

    def slept_s(self) -> float:
        return float(sum(block.slept_s for block in self.net))


class SlowStorage(TorchCheckpointIO):
    """Checkpoints go where writing takes a while."""

    def __init__(self, save_s: float) -> None:
        super().__init__()
        self._save_s = save_s

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        time.sleep(self._save_s)


class HostWork(pl.Callback):
    """A callback of the user's that takes a while after each batch."""

    def __init__(self, work_s: float) -> None:
        self._work_s = work_s

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(self._work_s)


class Clock(pl.Callback):
    """Times the steps that count, by itself."""

    def __init__(self) -> None:
        self._start = (0.0, 0.0)
        self._end = (0.0, 0.0)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARMUP:
            self._start = self._now(module)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._end = self._now(module)

    def timed(self, steps: int) -> Timed:
        wall_s, compute_s = (
            (late - early) / (steps - WARMUP) for early, late in zip(self._start, self._end, strict=True)
        )
        return Timed(wall_s, compute_s)

    def _now(self, module: Any) -> tuple[float, float]:
        return time.monotonic(), module.slept_s()


def _strategy(run: Run) -> Any:
    storage = SlowStorage(run.save_s)
    if run.strategy == "ddp":
        buckets = {} if run.bucket_bytes is None else {"bucket_cap_mb": run.bucket_bytes / (1 << 20)}
        return DDPStrategy(checkpoint_io=storage, **buckets)
    sync = {"timeout_s": 30.0, **({} if run.bucket_bytes is None else {"bucket_bytes": run.bucket_bytes})}
    parallel: Any = "zero2" if run.strategy == "zero2" else "ddp"
    if run.strategy == "pipeline":
        pipeline = {"size": 4, "schedule": "gpipe", "micro_batches": run.micro_batches}
        parallel = {"mode": "pipeline", "pipeline": pipeline}
    return HierDistStrategy(parallel=parallel, sync=sync, checkpoint_io=storage)


def train(context: RankContext, run: Run, samples: Path, scratch: Path, record: Path | None) -> Timed:
    """Perform a run on this rank.

    Args:
        context: The rank.
        run: What is run.
        samples: The file of the store.
        scratch: For checkpoints.
        record: Where the monitor writes; ``None``: nothing is watched.
    """
    torch.set_num_threads(1)
    clock = Clock()
    callbacks: list[pl.Callback] = []
    if record is not None:
        callbacks += [StepTimeline(record), ClusterMonitor(record, interval_s=_SAMPLE_S)]
    if run.save_every:
        callbacks.append(ModelCheckpoint(scratch, every_n_train_steps=run.save_every, save_top_k=1, monitor=None))
    if run.callback_s:
        callbacks.append(HostWork(run.callback_s))
    trainer = trainer_on_pool(
        context,
        _strategy(run),
        callbacks=[*callbacks, clock],
        max_steps=run.steps,
        enable_checkpointing=bool(run.save_every),
        use_distributed_sampler=takes_sampler(run),
        default_root_dir=scratch,
    )
    trainer.fit(Subject(run, rank=context.rank), make_loader(run, samples, rank=context.rank))
    return clock.timed(run.steps)
