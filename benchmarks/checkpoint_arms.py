"""What the checkpoint benchmark compares: ways to save, and a callback that times a loop that saves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from tests.distributed.lightning_runs import PoolEnvironment, loader_of, strategy_of, trainer_on_pool
from tests.support.tasks import RankContext

WIDTH = 2048
ALONE = 3  # steps that nothing disturbs, before each save; the first still feels the wait before it
AFTER = 4  # steps that are timed together with the save before them
SAVES = 4  # the first allocates and is left out; the last is waited for at once
Times = dict[str, list[float]]


class Arm(Protocol):
    """A way to save."""

    def save(self, trainer: pl.Trainer, path: Path) -> None:
        """Begin to; the loop goes on when it returns."""

    def before_step(self) -> None:
        """An optimizer is about to change weights."""

    def is_done(self) -> bool:
        """Whether what was begun is durable."""

    def wait(self) -> None:
        """Until it is."""


class Sync:
    """Returns when all is done.

    Args:
        save: Does it.
    """

    def __init__(self, save: Callable[[pl.Trainer, Path], object]) -> None:
        self._save = save

    def save(self, trainer: pl.Trainer, path: Path) -> None:
        self._save(trainer, path)

    def before_step(self) -> None:
        """Nothing goes on."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing is left."""


class ByTrainer(Sync):
    """``trainer.save_checkpoint``; our strategy's saver says when it is durable."""

    _saver: Any = None

    def __init__(self) -> None:
        super().__init__(lambda trainer, path: trainer.save_checkpoint(path))

    def save(self, trainer: pl.Trainer, path: Path) -> None:
        super().save(trainer, path)
        self._saver = getattr(trainer.strategy, "_saver", None)

    def is_done(self) -> bool:
        return self._saver is None or self._saver._writing is None or not self._saver._writing.is_running

    def wait(self) -> None:
        if self._saver is not None:
            self._saver.finish()


class AsyncIO(ByTrainer):
    """Lightning's plugin; its only worker does one thing after another."""

    def __init__(self, plugin: AsyncCheckpointIO) -> None:
        super().__init__()
        self._plugin = plugin

    def save(self, trainer: pl.Trainer, path: Path) -> None:
        super().save(trainer, path)
        executor = self._plugin._executor  # of rank 0, which writes
        self._end = None if executor is None else executor.submit(lambda: None)

    def is_done(self) -> bool:
        return self._end is None or self._end.done()

    def wait(self) -> None:
        if self._end is not None:
            self._end.result()


class DcpAsync(Sync):
    """``async_save`` in a thread, on a group of its own.

    Args:
        overlaps: Stages in a thread, into memory that is used again, until the optimizer's step; else as by default.
    """

    def __init__(self, *, overlaps: bool) -> None:
        self._group = dist.new_group(backend="gloo")
        self._stager = DefaultStager(StagingOptions(False, False, True, False)) if overlaps else None
        self._running: Any = None
        self._staged: Any = None

    def save(self, trainer: pl.Trainer, path: Path) -> None:
        self.wait()
        started: Any = dcp.async_save(
            _state(trainer), checkpoint_id=path, process_group=self._group, async_stager=self._stager
        )
        self._running = started if self._stager is None else started.upload_completion
        self._staged = None if self._stager is None else started.staging_completion

    def before_step(self) -> None:
        if self._staged is not None:
            self._staged.result()

    def is_done(self) -> bool:
        return bool(self._running.done())

    def wait(self) -> None:
        if self._running is not None:
            self._running.result()


class Copy(Sync):
    """All of the state, into memory that is there."""

    def __init__(self) -> None:
        super().__init__(self._copy)
        self._memory: list[torch.Tensor] = []

    def _copy(self, trainer: pl.Trainer, path: Path) -> None:
        optimizer = trainer.optimizers[0]
        tensors = [p.detach() for p in trainer.lightning_module.parameters()]
        tensors += [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        if not self._memory:
            self._memory = [torch.empty_like(tensor) for tensor in tensors]
        for memory, tensor in zip(self._memory, tensors, strict=True):
            memory.copy_(tensor)


class Nothing(Sync):
    """No checkpoint at all: what the measurement itself shows."""

    def __init__(self) -> None:
        super().__init__(lambda trainer, path: None)


_COPIER = """
size, chunk = int(sys.argv[1]), 64 << 20
source, target = bytearray(chunk), bytearray(chunk)
for _ in range(0, size, chunk):
    target[:] = source
"""
_WRITER = """
size, chunk = int(sys.argv[1]), 4 << 20
data = bytes(chunk)
file = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
for start in range(0, size, chunk):
    zlib.crc32(data)
    os.write(file, data)
    if start % (32 << 20) == 0:
        os.fdatasync(file)
os.fsync(file)
"""


class Neighbour(Sync):
    """Another process does something on the cores that this thread is kept from: nothing of the interpreter is shared.

    Args:
        code: What it does, given a number of bytes and a path.
        times: How often as many bytes as the state has.
    """

    def __init__(self, code: str, *, times: int = 1) -> None:
        super().__init__(self._start)
        self._code = f"import os, sys, zlib\n{code}"
        self._times = times
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self, trainer: pl.Trainer, path: Path) -> None:
        self.wait()
        size_bytes = 12 * sum(p.numel() for p in trainer.lightning_module.parameters()) * self._times
        self._process = subprocess.Popen([sys.executable, "-S", "-c", self._code, str(size_bytes), str(path)])
        others = set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0)
        os.sched_setaffinity(self._process.pid, others or os.sched_getaffinity(0))

    def is_done(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def wait(self) -> None:
        if self._process is not None:
            self._process.wait()


def _state(trainer: pl.Trainer) -> dict[str, Any]:
    return {"model": trainer.lightning_module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}


class Made(NamedTuple):
    """Of an arm."""

    strategy: Any
    arm: Arm
    plugins: tuple[Any, ...] = ()


def _ours(checkpoint: Any, parallel: str = "ddp") -> Made:
    return Made(strategy_of(parallel=parallel, checkpoint=checkpoint), ByTrainer())


def _async_io() -> Made:
    plugin = AsyncCheckpointIO()
    return Made(DDPStrategy(), AsyncIO(plugin), (plugin,))


_OVERLAPPED = {"mode": "async_sharded", "snapshot": "overlapped"}
ARMS: dict[str, Callable[[], Made]] = {
    "hierdist_async": lambda: _ours("async_sharded"),
    "hierdist_overlapped": lambda: _ours(_OVERLAPPED),
    "hierdist_sharded": lambda: _ours("sharded"),
    "hierdist_zero2_async": lambda: _ours("async_sharded", "zero2"),
    "hierdist_zero2_overlapped": lambda: _ours(_OVERLAPPED, "zero2"),
    "lightning": lambda: Made(DDPStrategy(), ByTrainer()),
    "lightning_async_io": _async_io,
    "dcp": lambda: Made(DDPStrategy(), Sync(lambda trainer, path: dcp.save(_state(trainer), checkpoint_id=path))),
    "dcp_async": lambda: Made(DDPStrategy(), DcpAsync(overlaps=False)),
    "dcp_async_overlapped": lambda: Made(DDPStrategy(), DcpAsync(overlaps=True)),
    "copy": lambda: Made(DDPStrategy(), Copy()),
    "neighbour_copy": lambda: Made(DDPStrategy(), Neighbour(_COPIER, times=8)),
    "neighbour_write": lambda: Made(DDPStrategy(), Neighbour(_WRITER)),
    "nothing": lambda: Made(DDPStrategy(), Nothing()),
}


class Blocks(pl.LightningModule):
    """Square layers.

    Args:
        parameters: About how many.
        arm: Told before each step of the optimizer.
    """

    def __init__(self, parameters: float, arm: Arm) -> None:
        super().__init__()
        torch.manual_seed(0)
        count = max(1, round(parameters / (WIDTH * WIDTH)))
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))
        self._arm = arm

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).pow(2).mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._arm.before_step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class SavingLoop(pl.Callback):
    """Steps alone, a save, steps after it, again and again; a save ends before the next steps alone begin.

    Args:
        arm: How to save.
        folder: Where.
        keep_apart: Called after each save: puts threads where they belong.
    """

    def __init__(self, arm: Arm, folder: Path, keep_apart: Callable[[], None]) -> None:
        self.arm = arm
        self.folder = folder
        self.keep_apart = keep_apart
        keys = ("stall", "late", "longest", "durable", "step", "step while writing", "unfinished")
        self.times: Times = {key: [] for key in keys}
        self._saved = 0
        self._place = 0  # in a round of ALONE + AFTER steps
        self._alone: list[float] = []
        self._after: list[float] = []
        self._was_writing = False
        self._end_s = 0.0
        self._save_s = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        now_s = time.perf_counter()
        self._note(now_s - self._end_s)
        self._place += 1
        if self._place == ALONE:
            self._save(trainer)
        elif self._place == ALONE + AFTER:
            self._close_round(time.perf_counter())
        self._end_s = time.perf_counter()

    def _note(self, step_s: float) -> None:
        if self._place < ALONE:
            if self._place and self._saved:  # the first round warms up
                self._alone.append(step_s)
            return
        self._after.append(step_s)
        if self._saved > 1 and self._was_writing and not self.arm.is_done():
            self.times["step while writing"].append(step_s)
        self._was_writing = not self.arm.is_done()

    def _save(self, trainer: pl.Trainer) -> None:
        dist.barrier()
        self._saved += 1
        path = self.folder / f"{self._saved}.ckpt"
        self._save_s = time.perf_counter()
        self.arm.save(trainer, path)
        stall_s = time.perf_counter() - self._save_s
        self.keep_apart()
        self._was_writing = not self.arm.is_done()
        self._after = []
        if self._saved > 1:
            self.times["stall"].append(stall_s)
        if self._saved == SAVES:
            self.arm.wait()
            dist.barrier()
            self.times["durable"].append(time.perf_counter() - self._save_s)

    def _close_round(self, now_s: float) -> None:
        if 1 < self._saved < SAVES:
            alone_s = sum(self._alone) / len(self._alone)
            self.times["step"] += self._alone
            self.times["late"].append(now_s - self._save_s - AFTER * alone_s)
            self.times["longest"].append(max(self._after) - alone_s)
        start_s = time.perf_counter()
        self.arm.wait()
        dist.barrier()
        if 1 < self._saved < SAVES:
            self.times["unfinished"].append(time.perf_counter() - start_s)
        self._alone, self._place = [], 0


def run_arm(context: RankContext, name: str, parameters: float, folder: str, *, own_core: bool) -> Times:
    """Train and save on this rank.

    Args:
        context: Of the pool.
        name: Of the arm.
        parameters: Of the model.
        folder: For checkpoints.
        own_core: This thread gets a core, and those that Python has started by the end of a save another one.
    """
    made = ARMS[name]()
    cores = sorted(os.sched_getaffinity(0))
    loop = SavingLoop(made.arm, Path(folder), (lambda: _pin_others(cores[1])) if own_core else (lambda: None))
    steps = (SAVES - 1) * (ALONE + AFTER) + ALONE
    try:
        if own_core:
            os.sched_setaffinity(threading.get_native_id(), {cores[0]})
        trainer = trainer_on_pool(
            context,
            made.strategy,
            callbacks=[loop],
            max_steps=steps,
            max_epochs=-1,
            plugins=[PoolEnvironment(), *made.plugins],
        )
        trainer.fit(Blocks(parameters, made.arm), loader_of([torch.ones(2, WIDTH)] * steps))
    finally:
        os.sched_setaffinity(threading.get_native_id(), cores)
    return loop.times


def _pin_others(core: int) -> None:
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.native_id is not None:
            os.sched_setaffinity(thread.native_id, {core})
