"""Tables that are dealt to ranks: look-ups some steps old, or ahead of their batch, against one process alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import lightning_dist
from tests.distributed.lightning_runs import loader_of, strategy_of, trainer_on_pool
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

NUM_ROWS, WIDTH, STEPS, HALF = 60, 5, 8, 4
LAYOUT = {"a": [0, 1], "b": [2]}
RANKS = 3
OPTIMIZERS = {
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
    "SparseAdam": torch.optim.SparseAdam,
    "RowWiseAdagrad": lightning_dist.RowWiseAdagrad,
}
Batch = dict[str, torch.Tensor]


def batch_of(step: int, rank: int) -> Batch:
    """Words and bags of them, with some that all ranks use in each step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    words = torch.cat([torch.randint(NUM_ROWS, (9,), generator=generator), torch.tensor([0, 1, 1])])
    return {"words": words, "offsets": torch.tensor([0, 3, 3, 7, 12]), "weights": torch.rand(12, generator=generator)}


class Bags(pl.LightningModule):
    """A table of words and one whose rows are summed in bags, both sparse, and nothing else.

    Args:
        optimizer: One of :data:`OPTIMIZERS`.
    """

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(NUM_ROWS, WIDTH, sparse=True)
        self.bags = nn.EmbeddingBag(NUM_ROWS, WIDTH, sparse=True, mode="sum", include_last_offset=True, padding_idx=5)
        self.optimizer = optimizer
        self.losses: list[float] = []

    def loss(self, batch: Batch) -> torch.Tensor:
        words = self.words(batch["words"]).view(4, 3, WIDTH).sum(1)
        bags = self.bags(batch["words"], batch["offsets"], per_sample_weights=batch["weights"])
        return torch.tanh(words * bags).square().mean()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](list(self.parameters()), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LooksAhead(Bags):
    """The same; it says which rows it will need."""

    def rows_of_batch(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        return {"words": batch["words"], "bags": batch["words"]}


def reference(optimizer: str, staleness: int, *, window: int = 1, drains: tuple[int, ...] = ()) -> Ended:
    """One process, whose look-ups see the tables of so many steps ago, or of the last drain."""
    module, seen = Bags(optimizer), Bags(optimizer)
    configured = module.configure_optimizers()
    stepping, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    states, oldest, losses = [_values(module)], 0, []
    for step in range(STEPS // window):
        seen.load_state_dict(states[max(oldest, step - staleness)])
        seen.zero_grad()
        for passed in range(step * window, (step + 1) * window):
            of_ranks = [seen.loss(batch_of(passed, rank)) for rank in range(RANKS)]
            torch.stack(of_ranks).mean().div(window).backward()
            losses.append([float(loss.detach()) for loss in of_ranks])
        for parameter, other in zip(module.parameters(), seen.parameters(), strict=True):
            parameter.grad = other.grad
        with torch.sparse.check_sparse_tensor_invariants(True):  # else torch warns that it does not
            stepping.step()
        schedule.step()
        states.append(_values(module))
        if step + 1 in drains:
            oldest = step + 1
    return Ended(states[-1], [list(of_rank) for of_rank in zip(*losses, strict=True)])


def _values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@dataclass
class Ended:
    """What a run leaves: whole tables, and the losses of a rank (of all, the reference)."""

    weights: dict[str, torch.Tensor]
    losses: list[Any]


class Saves(pl.Callback):
    """Saves once."""

    def __init__(self, path: str | None) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == HALF and self.path is not None:
            trainer.save_checkpoint(self.path)


def fit(
    context: RankContext,
    optimizer: str,
    options: dict[str, Any],
    *,
    looks_ahead: bool,
    window: int = 1,
    checkpoint: str = "full",
    save: str | None = None,
    resume: str | None = None,
) -> Ended:
    module = LooksAhead(optimizer) if looks_ahead else Bags(optimizer)
    sync = {"sparse": {"exchange": "parameter_server"}, "parameter_server": options}
    first = HALF if resume is not None else 0
    trainer = trainer_on_pool(
        context,
        strategy_of(sync=sync, checkpoint=checkpoint),
        callbacks=[Saves(save)],
        accumulate_grad_batches=window,
        default_root_dir=context.tmp_path,
    )
    batches = [batch_of(step, context.rank) for step in range(first, STEPS)]
    trainer.fit(module, loader_of(batches), ckpt_path=resume)
    return Ended(_values(module), module.losses)


def check(results: list[Ended], expected: Ended, *, first: int = 0) -> None:
    """Up to a few roundings, which roots make larger where gradients are small; a step more or less is 1e-3."""
    for rank, ended in enumerate(results):
        torch.testing.assert_close(ended.losses, expected.losses[rank][first:], rtol=0, atol=1e-5)
        assert ended.weights.keys() == expected.weights.keys()
        for name, value in ended.weights.items():
            torch.testing.assert_close(value, expected.weights[name], rtol=0, atol=1e-5)


CASES = {
    f"{optimizer}, {staleness} steps old, {'ahead' if looks_ahead else 'in time'}": (optimizer, staleness, looks_ahead)
    for optimizer in OPTIMIZERS
    for staleness in (0, 1, 4)
    for looks_ahead in (False, True)
}
ALWAYS = [
    "SGD, 0 steps old, in time",
    "Adagrad, 0 steps old, ahead",
    "SparseAdam, 1 steps old, ahead",
    "RowWiseAdagrad, 4 steps old, in time",
    "RowWiseAdagrad, 4 steps old, ahead",
]


@pytest.mark.parametrize(("optimizer", "staleness", "looks_ahead"), sampled(CASES, ALWAYS))
def test_look_ups_are_exactly_as_old_as_said(
    ranks: RankPool, optimizer: str, staleness: int, looks_ahead: bool
) -> None:
    results = ranks.run(
        fit, layout=LAYOUT, args=(optimizer, {"staleness": staleness}), kwargs={"looks_ahead": looks_ahead}
    )
    check(results, reference(optimizer, staleness))
