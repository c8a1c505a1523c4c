"""Recomputation under every mode: the same numbers bit for bit, each block run as often as its mode says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.distributed.lightning_runs import Batch, loader_of, make_batches, mse, sgd, strategy_of, trainer_on_pool
from tests.distributed.sharded_runs import LAYOUTS, MODES
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

BATCHES, BLOCKS, BATCH_SIZE, WIDTH, HIDDEN = 4, 4, 4, 8, 13
BUDGET_BYTES = 4_000  # they keep 5.3 kB if none is recomputed
ALL_MODES = {"ddp": {"parallel": "ddp"}, **MODES}
RECOMPUTED = {
    "full": {"recompute": "full"},
    "every_n": {"recompute": {"mode": "every_n", "every": 3}},
    "selective": {"recompute": "selective"},
    "budget": {"recompute": {"mode": "budget", "budget": BUDGET_BYTES}},
}


class Block(nn.Module):
    """Draws masks, writes to buffers, and counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x + self.down(functional.dropout(torch.tanh(self.norm(self.up(x))), 0.3, self.training))


class Deep(pl.LightningModule):
    """A frozen first layer, equal blocks of which one is called twice, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 3)
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.blocks[1]):
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = mse(self, batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", mse(self, batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd([p for p in self.parameters() if p.requires_grad])


class Describe(pl.Callback):
    """What the strategy says of the recomputation at the end."""

    said = ""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        recomputation = trainer.strategy.recomputation
        self.said = "" if recomputation is None else recomputation.describe()


@dataclass(frozen=True)
class Left:
    """What a fit left: the state, losses, how often each block ran in training, and what was said."""

    state: dict[str, torch.Tensor]
    losses: list[float]
    runs: list[int]
    said: str


def fit(context: RankContext, **strategy: Any) -> Left:
    """Train with accumulation, clipping and a validation."""
    torch.manual_seed(context.rank)
    module, describe = Deep(), Describe()
    torch.manual_seed(100 + context.rank)  # of the masks
    trainer = trainer_on_pool(
        context,
        strategy_of(**strategy),
        callbacks=[describe],
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    batches = make_batches(context.world_size, BATCHES)[context.rank]
    trainer.fit(module, loader_of(batches))
    assert not any("forward" in vars(block) for block in module.blocks), "recomputation outlives the fit"
    state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    return Left(state, module.losses, [block.runs for block in module.blocks], describe.said)


def fit_all(context: RankContext, mode: str) -> dict[str, Left]:
    """Without recomputation, and with each kind of it."""
    return {name: fit(context, **ALL_MODES[mode], **options) for name, options in {"off": {}, **RECOMPUTED}.items()}


@pytest.mark.parametrize("mode", sampled({mode: (mode,) for mode in ALL_MODES}, ["ddp", "zero2", "zero3", "hsdp"]))
def test_recomputation_changes_nothing_but_how_often_blocks_run(ranks: RankPool, mode: str) -> None:
    outcomes = ranks.run(fit_all, layout=LAYOUTS["1+1"], args=(mode,))
    assert len({tuple(left["budget"].runs) for left in outcomes}) == 1, "ranks choose alike"
    for left in outcomes:
        plain = left["off"]
        once = [BATCHES, 2 * BATCHES, BATCHES, BATCHES]
        assert plain.runs == once
        for name, recomputed in left.items():
            assert recomputed.losses == plain.losses, name
            different = [key for key, tensor in plain.state.items() if not torch.equal(recomputed.state[key], tensor)]
            assert different == [], name
        twice = [2 * runs for runs in once]
        assert left["full"].runs == left["selective"].runs == twice
        assert left["every_n"].runs == [twice[0], once[1], once[2], twice[3]]
        assert "full: 4 of 4 blocks" in left["full"].said
        first_only = [runs + runs // BATCHES for runs in once]  # before anything was measured
        assert all(runs in pair for runs, *pair in zip(left["budget"].runs, twice, first_only, strict=True))
        assert 0 < sum(runs == all_ for runs, all_ in zip(left["budget"].runs, twice, strict=True)) < BLOCKS
        assert "recompute=budget (4.0 kB)" in left["budget"].said
        assert "predicted:" in left["budget"].said
