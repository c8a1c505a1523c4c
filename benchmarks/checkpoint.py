"""How long a checkpoint holds training, and how long it takes to be on disk, beside what a user would use instead.

    python -m benchmarks.checkpoint --rounds 3
    python -m benchmarks.checkpoint --arms hierdist_async lightning --parameters 20e6

Two ranks with the same model and AdamW, so 12 bytes of state a parameter; each arm trains a few steps and saves between
them. The first save of a run is left out: it allocates. ``stall`` is how long the training loop is held by a save,
``durable`` how long until all of it is on disk; ``copy`` is a plain copy of the state by each rank into memory that is
there. Arms take turns. Results go to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.ending import clean_up_when_terminated
from benchmarks.record import RESULTS, commit, today
from tests.distributed.lightning_runs import loader_of, strategy_of, trainer_on_pool
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

WIDTH = 2048
SAVES = 4  # the first is left out; the last is waited for
Times = dict[str, list[float]]


class Blocks(pl.LightningModule):
    """Square layers."""

    def __init__(self, parameters: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        count = max(1, round(parameters / (WIDTH * WIDTH)))
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Saves(pl.Callback):
    """Saves after each second step, and takes the time.

    Args:
        save: Begins a save, given the trainer and a path; what it returns waits for its end.
        folder: Where.
    """

    def __init__(self, save: Callable[[pl.Trainer, Path], Callable[[], None]], folder: Path) -> None:
        self.save = save
        self.folder = folder
        self.times: Times = {"stall": [], "durable": [], "step": [], "step while writing": []}
        self.count = 0
        self._writing = False
        self._start_s = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._start_s = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        step_s = time.perf_counter() - self._start_s
        if trainer.global_step > 2:
            self.times["step while writing" if self._writing else "step"].append(step_s)
        if trainer.global_step % 2:
            return
        dist.barrier()
        self.count += 1
        start_s = time.perf_counter()
        wait = self.save(trainer, self.folder / f"{self.count}.ckpt")
        stall_s = time.perf_counter() - start_s
        self._writing = True
        if self.count in (1, SAVES):
            wait()
            dist.barrier()
            self._writing = False
        if self.count == SAVES:
            self.times["durable"].append(time.perf_counter() - start_s)
        if self.count > 1:
            self.times["stall"].append(stall_s)


def _nothing_left() -> None:
    """Who has waited for all of it has nothing left to wait for."""


def _by_trainer(trainer: pl.Trainer, path: Path) -> Callable[[], None]:
    trainer.save_checkpoint(path)
    saver = getattr(trainer.strategy, "_saver", None)
    return _nothing_left if saver is None else saver.finish


def _state(trainer: pl.Trainer) -> dict[str, Any]:
    return {"model": trainer.lightning_module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}


def _by_dcp(trainer: pl.Trainer, path: Path) -> Callable[[], None]:
    dcp.save(_state(trainer), checkpoint_id=path)
    return _nothing_left


class _DcpAsync:
    """``async_save`` in a thread, on a group of its own."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._running: Any = None

    def __call__(self, trainer: pl.Trainer, path: Path) -> Callable[[], None]:
        if self._running is not None:
            self._running.result()
        self._running = dcp.async_save(_state(trainer), checkpoint_id=path, process_group=self._group)
        return lambda: self._running.result() and None


class _Copy:
    """Into memory that is there."""

    def __init__(self) -> None:
        self._memory: list[torch.Tensor] = []

    def __call__(self, trainer: pl.Trainer, path: Path) -> Callable[[], None]:
        optimizer = trainer.optimizers[0]
        tensors = [p.detach() for p in trainer.lightning_module.parameters()]
        tensors += [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        if not self._memory:
            self._memory = [torch.empty_like(tensor) for tensor in tensors]
        for memory, tensor in zip(self._memory, tensors, strict=True):
            memory.copy_(tensor)
        return _nothing_left


ARMS: dict[str, Callable[[], tuple[Any, Callable[[pl.Trainer, Path], Callable[[], None]], list[Any]]]] = {
    "hierdist_async": lambda: (strategy_of(checkpoint="async_sharded"), _by_trainer, []),
    "hierdist_sharded": lambda: (strategy_of(checkpoint="sharded"), _by_trainer, []),
    "hierdist_zero2_async": lambda: (strategy_of(parallel="zero2", checkpoint="async_sharded"), _by_trainer, []),
    "lightning": lambda: (DDPStrategy(), _by_trainer, []),
    "lightning_async_io": lambda: (DDPStrategy(), _by_trainer, [AsyncCheckpointIO()]),
    "dcp": lambda: (DDPStrategy(), _by_dcp, []),
    "dcp_async": lambda: (DDPStrategy(), _DcpAsync(), []),
    "copy": lambda: (DDPStrategy(), _Copy(), []),
}


def run_arm(context: RankContext, arm: str, parameters: float, folder: str) -> Times:
    """Train and save on this rank."""
    strategy, save, plugins = ARMS[arm]()
    callback = Saves(save, Path(folder))
    trainer = trainer_on_pool(
        context, strategy, callbacks=[callback], max_steps=2 * SAVES, max_epochs=-1, plugins=plugins
    )
    trainer.fit(Blocks(parameters), loader_of([torch.ones(2, WIDTH)] * 2 * SAVES))
    return callback.times


def main(argv: Sequence[str] | None = None) -> int:
    """Run the arms in turn and write what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--folder", type=Path, help="where to write checkpoints (default: a temporary folder)")
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/<date>-checkpoint.json")
    arguments = parser.parse_args(argv)
    seen: dict[str, list[Times]] = {arm: [] for arm in arguments.arms}
    for number in range(arguments.rounds):
        for arm in arguments.arms:
            folder = Path(tempfile.mkdtemp(dir=arguments.folder))
            try:
                with RankPool() as pool:
                    ranks = pool.run(
                        run_arm, world_size=2, args=(arm, arguments.parameters, str(folder)), deadline_s=300
                    )
            finally:
                shutil.rmtree(folder)
            seen[arm].append(
                {key: [max(values) for values in zip(*(r[key] for r in ranks), strict=True)] for key in ranks[0]}
            )
            print(
                number, arm, {key: [round(v, 2) for v in values] for key, values in seen[arm][-1].items()}, flush=True
            )
    document = {
        "date": today(),
        "commit": commit(),
        "command": " ".join(["python -m benchmarks.checkpoint", *(sys.argv[1:] if argv is None else argv)]),
        "parameters": arguments.parameters,
        "rounds": seen,
        "medians": {arm: _medians(rounds) for arm, rounds in seen.items()},
    }
    output = arguments.output or RESULTS / f"{today()}-checkpoint.json"
    output.write_text(json.dumps(document, indent=1) + "\n")
    table = Table("arm", "stall, s", "durable, s", "step, s", "step while writing, s")
    for arm, medians in document["medians"].items():
        table.add_row(
            arm,
            *(
                f"{medians[key]:.3f}" if medians[key] else "-"
                for key in ("stall", "durable", "step", "step while writing")
            ),
        )
    Console(width=120).print(table)
    return 0


def _medians(rounds: list[Times]) -> dict[str, float]:
    return {key: statistics.median([v for times in rounds for v in times[key]] or [0.0]) for key in rounds[0]}


if __name__ == "__main__":
    clean_up_when_terminated()
    raise SystemExit(main())
