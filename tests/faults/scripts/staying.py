"""Trains ten steps under ``hierdist launch``, with ranks that are killed: ``FOLDER PLAN [OPTION]...``.

PLAN says who is killed, ``ROUND:RANK:STEP`` and so on, separated by commas. Data follow from step and rank, so that
the weights at the end do not tell whether somebody was. Options: ``--parallel MODE``; ``--once``: the script refuses to
run twice in a process; ``--new``: it asks for new processes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader

from lightning_dist import AsyncShardedCheckpoint, HierDistStrategy

NUM_STEPS = 10
ROUND = int(os.environ["HIERDIST_ROUND"])


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(1000 * self.trainer.global_step + self.global_rank)
        inputs = torch.randn(4, 8, generator=random)
        return (self.layers(inputs) - inputs.flip(1) * batch.mean()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Fate(Callback):
    """Says who begins where, and kills as planned."""

    def __init__(self, plan: str) -> None:
        self._plan = {tuple(map(int, part.split(":"))) for part in filter(None, plan.split(","))}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        print(
            f"round {ROUND}, rank {trainer.global_rank}, pid {os.getpid()}, after step {trainer.global_step}, "
            f"{files} files, {threads} threads",
            flush=True,
        )

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if (ROUND, trainer.global_rank, trainer.global_step) in self._plan:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("plan")
    parser.add_argument("--parallel", default="ddp")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--new", action="store_true")
    options = parser.parse_args()
    if options.once:
        if hasattr(sys, "has_run"):
            raise ValueError("runs once in a process")
        sys.has_run = True  # type: ignore[attr-defined]
    seed_everything(1, verbose=False)
    module = Module()
    trainer = Trainer(
        strategy=HierDistStrategy(
            parallel=options.parallel,
            checkpoint="sharded",
            elastic={"mode": "restart", "in_place": not options.new},
        ),
        accelerator="cpu",
        devices=2,
        max_steps=NUM_STEPS,
        default_root_dir=options.folder,
        callbacks=[AsyncShardedCheckpoint(options.folder / "checkpoints", every_n_train_steps=2), Fate(options.plan)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.ones(1000, 8), batch_size=4, num_workers=1))
    weights = b"".join(each.detach().numpy().tobytes() for each in module.state_dict().values())
    print(f"rank {trainer.global_rank} ends with {hashlib.sha256(weights).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
