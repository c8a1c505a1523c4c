"""Local SGD through Lightning, and the same algorithm in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_dist.config import LocalSGDConfig
from tests.distributed.lightning_runs import (
    Batch,
    OddModule,
    adamw,
    loader_of,
    make_batches,
    mse,
    odd_model,
    sgd,
    strategy_of,
    trainer_on_pool,
)
from tests.support.tasks import RankContext

LAYOUTS: dict[str, dict[str, list[int]]] = {
    "2+2": {"a": [0, 1], "b": [2, 3]},
    "1+1": {"a": [0], "b": [1]},
    "2+1": {"a": [0, 1], "b": [2]},
    "1+1+1": {"a": [0], "b": [1], "c": [2]},
    "2": {"a": [0, 1]},
}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd": sgd,
    "adamw": adamw,
}
STEPS = 10


def workers_of(layout: str, workers: str = "hosts") -> list[list[int]]:
    hosts = list(LAYOUTS[layout].values())
    return hosts if workers == "hosts" else [[rank] for host in hosts for rank in host]


def train(
    context: RankContext,
    parallel: str,
    options: dict[str, Any],
    optimizer: str = "sgd",
    accumulation: int = 1,
    batches: int = STEPS,
    sync: dict[str, Any] | None = None,
    **trainer_options: Any,
) -> dict[str, torch.Tensor]:
    """Weights at the end of training."""
    module = OddModule(OPTIMIZERS[optimizer])
    strategy = strategy_of(parallel=parallel, sync={"algorithm": "local_sgd", "local_sgd": options, **(sync or {})})
    trainer = trainer_on_pool(context, strategy, accumulate_grad_batches=accumulation, **trainer_options)
    trainer.fit(module, loader_of(make_batches(context.world_size, batches)[context.rank]))
    return {name: value.detach().clone() for name, value in module.net.state_dict().items()}


# -- the reference ---------------------------------------------------------------------------------------------------


def _gradient(model: nn.Module, windows: Sequence[Sequence[Batch]]) -> None:
    """The mean over ranks of the mean over a window of each."""
    model.zero_grad()
    count = sum(map(len, windows))
    for window in windows:
        for batch in window:
            (mse(model, batch) / count).backward()


def simulate(
    parts: Sequence[Sequence[int]],
    options: dict[str, Any],
    optimizer: str = "sgd",
    accumulation: int = 1,
    batches: int = STEPS,
    *,
    fragment_of: Callable[[int, int], int] = lambda index, fragments: 0,
) -> dict[str, torch.Tensor]:
    """Workers one after another; written from the papers, with nothing of the library but its options."""
    config = LocalSGDConfig(**options)
    world_size = sum(map(len, parts))
    shares = [len(part) / world_size for part in parts]
    data = make_batches(world_size, batches)
    torch.manual_seed(0)
    first = odd_model()
    models = [copy.deepcopy(first) for _ in parts]
    optimizers = [OPTIMIZERS[optimizer](list(model.parameters())) for model in models]
    weights = [list(model.parameters()) for model in models]
    outer = [p.detach().clone() for p in first.parameters()]
    momentum = [torch.zeros_like(value) for value in outer]
    sent: list[tuple[int, int, dict[int, torch.Tensor]]] = []
    last: dict[int, int] = {}
    fragments = [
        [i for i in range(len(outer)) if fragment_of(i, config.fragments) == f] for f in range(config.fragments)
    ]

    def gone(fragment: int) -> dict[int, torch.Tensor]:
        with torch.no_grad():
            return {
                i: sum(share * (outer[i] - own[i]) for share, own in zip(shares, weights, strict=True))  # type: ignore[misc]
                for i in fragments[fragment]
            }

    @torch.no_grad()
    def apply(means: dict[int, torch.Tensor], kept: float) -> None:
        for i, mean in means.items():
            momentum[i] = config.outer_momentum * momentum[i] + mean
            step = mean + config.outer_momentum * momentum[i] if config.nesterov else momentum[i]
            outer[i] -= config.outer_lr * step
            for own in weights:
                own[i].copy_(kept * own[i] + (1 - kept) * outer[i])

    steps = -(-batches // accumulation)
    for step in range(1, steps + 1):
        window = slice((step - 1) * accumulation, step * accumulation)
        together = step <= config.warmup_steps
        for part, model, each in zip(parts, models, optimizers, strict=True):
            ranks = range(world_size) if together else part
            _gradient(model, [data[rank][window] for rank in ranks])
            each.step()
        if together:
            outer = [p.detach().clone() for p in models[0].parameters()]
            continue
        for fragment, at, means in [each for each in sent if each[1] + config.overlap_steps <= step]:
            apply(means, config.kept)
            sent.remove((fragment, at, means))
        for fragment in range(config.fragments):
            offset = (fragment + 1) * config.every // config.fragments
            if (step - config.warmup_steps - offset) % config.every == 0:
                sent.append((fragment, step, gone(fragment)))
                last[fragment] = step
                if not config.overlap_steps:
                    apply(sent.pop()[2], config.kept)
    for _, _, means in sent:
        apply(means, 0.0)
    if steps > config.warmup_steps:
        for fragment in range(config.fragments):
            if last.get(fragment) != steps or config.overlap_steps:
                apply(gone(fragment), 0.0)
    names = [name for name, _ in first.named_parameters()]
    return dict(zip(names, outer, strict=True))


class SaveAt(pl.Callback):
    """Saves once, after a batch.

    Args:
        path: Where.
        batch_idx: After which batch of the first epoch.
    """

    def __init__(self, path: Path, batch_idx: int) -> None:
        self._path = path
        self._batch_idx = batch_idx

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self._batch_idx:
            trainer.save_checkpoint(self._path)
