"""Some steps of the example's GPT on one rank of a pool: when each ended, its loss, and what the host had sent."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.arms import sent_bytes
from benchmarks.compression.arms import strategy_of
from examples.model import Learner
from examples.text_data import ExampleData
from lightning_dist.run_config import AdamWConfig, GPTConfig, TextDataConfig
from tests.distributed.lightning_runs import trainer_on_pool
from tests.support.tasks import RankContext

SMALL = GPTConfig(block_size=64, n_layer=4, n_head=4, n_embd=128)
"""0.83M parameters: a step takes two cores about as long as a tenth of what 100 Mbit/s take for its gradients."""

DEFAULT = GPTConfig()
"""What the example trains if it is not told: 10.8M parameters."""


@dataclass(frozen=True)
class Task:
    """What is trained, and how long.

    Attributes:
        model: The GPT.
        steps: Optimizer steps.
        planned: Optimizer steps over which the learning rate is planned.
        batch: Sequences a rank and micro-batch.
        seq_len: Bytes of a sequence; ``None``: the model's.
        accumulation: Micro-batches an optimizer step.
        seed: Of weights and of the order of samples.
        exact_steps: Of onebit, at the beginning.
        parallel: Mode of this package's arms.
        sync: More of ``sync``, for this package's arms.
    """

    model: GPTConfig = SMALL
    steps: int = 300
    planned: int = 300
    batch: int = 4
    seq_len: int | None = None
    accumulation: int = 1
    seed: int = 0
    exact_steps: int = 2
    parallel: str = "ddp"
    sync: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """One rank's view, a value an optimizer step.

    Attributes:
        ends_s: When each ended, of a clock that all ranks of a machine share.
        sent: Bytes that the rank's host had sent by then.
        losses: Of this rank.
    """

    ends_s: list[float]
    sent: list[int]
    losses: list[float]


class _Ends(pl.Callback):
    def __init__(self) -> None:
        self.trained = Trained([], [], [])
        self._step = 0
        self._losses: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._losses.append(outputs["loss"].detach() * trainer.accumulate_grad_batches)
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self.trained.ends_s.append(time.monotonic())
        self.trained.sent.append(sent_bytes())
        self.trained.losses.append(torch.stack(self._losses).mean().item())
        self._losses.clear()


def train(context: RankContext, arm: str, task: Task) -> Trained:
    """Train on this rank as ``examples/train.py data=naive`` does."""
    torch.set_num_threads(1)
    pl.seed_everything(task.seed, workers=True, verbose=False)
    ends = _Ends()
    text = TextDataConfig(batch_size=task.batch, seq_len=task.seq_len)
    strategy = strategy_of(arm, parallel=task.parallel, exact_steps=task.exact_steps, **task.sync)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_on_pool(
            context,
            strategy,
            max_epochs=-1,
            max_steps=task.steps,
            accumulate_grad_batches=task.accumulation,
            gradient_clip_val=1.0,
            limit_val_batches=0,
            use_distributed_sampler=True,
            default_root_dir=Path(folder),
            callbacks=[ends],
        )
        learner = Learner(task.model, AdamWConfig(), max_steps=task.planned)
        trainer.fit(learner, ExampleData(text, task.model, seed=task.seed))
    return ends.trained
