"""A model of a billion parameters, built on the meta device, that is never whole on one rank: the peak of each rank.

    python -m benchmarks.meta_build
    python -m benchmarks.meta_build --layers 2 --ranks 2

``configure_model`` makes the example's GPT under ``torch.device("meta")``; ``parallel=zero3`` gives it memory and
values block by block. Measured per rank: the largest resident set (``VmHWM``) of the build, and of one optimizer step
of SGD after it, each less the resident set before the build. Results go to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.ending import clean_up_when_terminated
from benchmarks.record import RESULTS, commit, today
from benchmarks.resident import free_at_once, restart_peak, status_bytes
from examples.model import GPT
from lightning_dist import HierDistStrategy
from lightning_dist.run_config import GPTConfig
from tests.distributed.lightning_runs import loader_of, trainer_on_pool
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

WIDTH, HEADS, SEQUENCE = 2048, 16, 16


class Large(pl.LightningModule):
    """Has no parameters until it is configured, and then none with memory."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.config = GPTConfig(n_layer=layers, n_embd=WIDTH, n_head=HEADS, block_size=SEQUENCE)
        self.net: GPT | None = None

    def configure_model(self) -> None:
        """On the meta device."""
        if self.net is None:
            with torch.device("meta"):
                self.net = GPT(self.config)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Cross entropy of the next token."""
        assert self.net is not None
        logits = self.net(batch[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Without state."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Peaks:
    """Of one rank, in bytes.

    Attributes:
        shards: Parameters it holds.
        build: Largest resident set of the build, less the one before.
        step: Largest resident set of an optimizer step, less the one before the build.
    """

    shards: int
    build: int
    step: int


class _Watch(pl.Callback):
    def __init__(self) -> None:
        self.before = status_bytes("VmRSS")
        self.build = 0
        restart_peak()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.build = status_bytes("VmHWM") - self.before
        restart_peak()


def build(context: RankContext, layers: int) -> Peaks:
    """On this rank."""
    torch.set_num_threads(1)
    free_at_once()
    watch, module = _Watch(), Large(layers)
    shards: list[int] = []
    strategy = HierDistStrategy("zero3", sync={"timeout_s": 600.0})
    trainer = trainer_on_pool(context, strategy, max_steps=1, callbacks=[watch])
    trainer.fit(module, loader_of([torch.randint(256, (1, SEQUENCE + 1))]))
    step = status_bytes("VmHWM") - watch.before
    shards = [getattr(p, "_local_tensor", p).numel() * p.element_size() for p in module.parameters()]
    return Peaks(sum(shards), watch.build, step)


def main(argv: Sequence[str] | None = None) -> int:
    """Build, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/<date>-meta-build.json")
    given = parser.parse_args(argv)
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=given.layers, n_embd=WIDTH, n_head=HEADS, block_size=SEQUENCE))
    count = sum(p.numel() for p in model.parameters())
    largest = max(sum(p.numel() for p in block.parameters()) for block in model.blocks)
    with RankPool() as pool:
        peaks: list[Peaks] = pool.run(
            build, world_size=given.ranks, args=(given.layers,), deadline_s=1200.0, fresh=True
        )
    result: dict[str, Any] = {
        "parameters": count,
        "whole_bytes": 4 * count,
        "largest_block_bytes": 4 * largest,
        "ranks": [asdict(peak) for peak in peaks],
        "command": f"python -m benchmarks.meta_build --layers {given.layers} --ranks {given.ranks}",
        "commit": commit(),
        "date": today(),
    }
    path = given.output or RESULTS / f"{today()}-meta-build.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    table = Table(title=f"{count:,} parameters, {4 * count / 1e9:.2f} GB whole, {4 * largest / 1e6:.0f} MB a block")
    for column in ("rank", "GB of shards", "peak of the build", "peak of a step"):
        table.add_column(column, justify="right")
    for rank, peak in enumerate(peaks):
        table.add_row(str(rank), *(f"{size / 1e9:.2f}" for size in (peak.shards, peak.build, peak.step)))
    Console().print(table)
    print(f"written: {path}")  # a script's last word
    return 0


if __name__ == "__main__":
    clean_up_when_terminated()
    sys.exit(main())
