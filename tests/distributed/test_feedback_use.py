"""Error feedback in the less usual runs: what is owed is neither lost nor paid where it does not belong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from tests.distributed.fixed_gradients import FixedGradients
from tests.distributed.lightning_runs import loader_of, strategy_of, trainer_on_pool
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

HOSTS = {"a": [0], "b": [1]}
SHAPES = {"first": (37, 5), "late": (300,), "second": (1501,)}
STEPS = 4


def gradients_of(rank: int, step: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


class Searched(FixedGradients):
    """With a learning rate that a search sets; knows what was owed when training itself began."""

    def __init__(self) -> None:
        super().__init__(SHAPES, uses=tuple(SHAPES), unfrozen_at=0)
        self.lr = 1.0
        self.began: list[tuple[float, int]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if batch_idx == 0:
            feedback = self.trainer.strategy._mode.feedback  # type: ignore[attr-defined]
            owed = [values.abs().sum() for pieces in feedback.owed().values() for _, values in pieces]
            self.began.append((float(sum(owed)), feedback.window))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def search_and_train(context: RankContext, folder: str, sync: dict[str, Any], checkpoint: str) -> list[Any]:
    module = Searched()
    finder = LearningRateFinder(num_training_steps=STEPS, early_stop_threshold=None, update_attr=False)
    trainer = trainer_on_pool(
        context,
        strategy_of(sync=sync, checkpoint=checkpoint),
        callbacks=[finder],
        limit_train_batches=STEPS,
        default_root_dir=Path(folder),
    )
    trainer.fit(module, loader_of([gradients_of(context.rank, step) for step in range(STEPS)]))
    return module.began


SYNCS: dict[str, dict[str, Any]] = {
    "topk": {"codec": "topk"},
    "int8": {"codec": "int8"},
    "powersgd": {"algorithm": "powersgd", "powersgd": {"rank": 1}},
}
SEARCHES = {f"{sync}-{checkpoint}": (SYNCS[sync], checkpoint) for sync in SYNCS for checkpoint in ("full", "sharded")}


@pytest.mark.parametrize(("sync", "checkpoint"), sampled(SEARCHES, ["topk-full"]))
def test_what_a_search_of_a_learning_rate_owes_is_not_paid_in_training(
    ranks: RankPool, tmp_path: Path, sync: dict[str, Any], checkpoint: str
) -> None:
    for began in ranks.run(search_and_train, layout=HOSTS, args=(str(tmp_path), sync, checkpoint), fresh=True):
        # The search's progress bar leaves a thread, therefore fresh ranks.
        assert began == [(0.0, 0)] * len(began)
        assert len(began) >= 2, "once in the search, once in training"


class KeptGradients(FixedGradients):
    """Gradients are set to zero, not to None; ``late`` takes part in every other step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.late.requires_grad_(True)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        used = ["first", "second"] if batch_idx % 2 else list(SHAPES)
        return torch.stack([(getattr(self, name) * batch[name]).sum() for name in used]).sum()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


def train_kept(context: RankContext, parallel: str, sync: dict[str, Any]) -> tuple[Any, Any]:
    module = KeptGradients(SHAPES, uses=tuple(SHAPES), unfrozen_at=0)
    strategy = strategy_of(sync=sync, parallel={"mode": parallel, "find_unused_parameters": True})
    trainer = trainer_on_pool(context, strategy)
    trainer.fit(module, loader_of([gradients_of(context.rank, step) for step in range(STEPS)]))
    return {name: p.detach().clone() for name, p in module.named_parameters()}, module.owed


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("zero2", marks=pytest.mark.sweep)])
def test_nothing_is_lost_where_gradients_become_zero_and_not_none(ranks: RankPool, parallel: str) -> None:
    got = ranks.run(train_kept, layout=HOSTS, args=(parallel, {"codec": "onebit"}))
    for name in SHAPES:
        steps = range(STEPS) if name != "late" else range(0, STEPS, 2)
        expected = sum(gradients_of(rank, step)[name] for rank in range(2) for step in steps) / 2
        owed = got[0][1][name] + got[1][1][name]
        torch.testing.assert_close(owed - got[0][0][name], expected, rtol=0, atol=2e-4)


class Scaled(FixedGradients):
    """Knows what is owed without the scaler's scale."""

    def on_train_end(self) -> None:
        super().on_train_end()
        scale = self.trainer.strategy._mode.feedback._scale  # type: ignore[attr-defined]
        self.scale = float(scale)
        self.owed = {name: value / scale for name, value in self.owed.items()}


def train_scaled(context: RankContext, parallel: str) -> tuple[Any, Any, float]:
    """The scale doubles every other step."""
    module = Scaled(SHAPES, uses=tuple(SHAPES), unfrozen_at=0)
    module.late.requires_grad_(True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    trainer = trainer_on_pool(
        context,
        strategy_of(sync={"codec": "onebit"}, parallel={"mode": parallel}),
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
    )
    trainer.fit(module, loader_of([gradients_of(context.rank, step) for step in range(2 * STEPS)]))
    return {name: p.detach().clone() for name, p in module.named_parameters()}, module.owed, module.scale


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("zero1", marks=pytest.mark.sweep)])
def test_what_is_owed_follows_a_scaler_that_changes_its_scale(ranks: RankPool, parallel: str) -> None:
    got = ranks.run(train_scaled, layout=HOSTS, args=(parallel,))
    assert got[0][2] == 64.0 * 2 ** (STEPS - 1)
    for name in SHAPES:
        expected = sum(gradients_of(rank, step)[name] for rank in range(2) for step in range(2 * STEPS)) / 2
        owed = got[0][1][name] + got[1][1][name]
        torch.testing.assert_close(owed - got[0][0][name], expected, rtol=0, atol=5e-4)


class Complex(pl.LightningModule):
    """Gradients known before, some of them complex."""

    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Parameter(torch.zeros(700))
        self.turned = nn.Parameter(torch.zeros(600, dtype=torch.complex64))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return (self.real * batch[0]).sum() + (self.turned * batch[1].conj()).real.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def complex_batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(700, generator=generator), torch.randn(600, generator=generator, dtype=torch.complex64)


def train_complex(context: RankContext, sync: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    module = Complex()
    strategy = strategy_of(sync=sync)
    owed: dict[str, Any] = {}

    class Note(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            owed.update(strategy._mode.feedback.owed())  # type: ignore[union-attr]

    trainer_on_pool(context, strategy, callbacks=[Note()]).fit(module, loader_of([complex_batch(context.rank)]))
    return module.turned.detach(), owed


@pytest.mark.parametrize("sync", sampled({name: (sync,) for name, sync in SYNCS.items()}, ["topk"]))
def test_complex_gradients_cross_as_they_are(ranks: RankPool, sync: dict[str, Any]) -> None:
    got = ranks.run(train_complex, layout=HOSTS, args=(sync,))
    expected = (complex_batch(0)[1] + complex_batch(1)[1]) / 2
    for turned, owed in got:
        torch.testing.assert_close(-turned, expected)
        assert "turned" not in owed


class Words(pl.LightningModule):
    """A table with sparse gradients that are known before."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(200, 7, sparse=True)
        nn.init.zeros_(self.words.weight)
        self.real = nn.Parameter(torch.zeros(3))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return (self.words(batch[0]) * batch[1]).sum() + self.real.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def words_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randint(200, (90,), generator=generator), torch.randn(90, 7, generator=generator)


def train_words(context: RankContext, sync: dict[str, Any]) -> torch.Tensor:
    module = Words()
    batches = [words_of(context.rank, step) for step in range(STEPS)]
    trainer_on_pool(context, strategy_of(sync=sync)).fit(module, loader_of(batches))
    return module.words.weight.detach()


TABLES = {f"{sync}-{above:g}": (SYNCS[sync], above) for sync in SYNCS for above in (0.0, 1.0)}


@pytest.mark.parametrize(("sync", "dense_above"), sampled(TABLES, ["int8-0"]))
def test_gradients_of_tables_cross_exact_as_rows_and_whole(
    ranks: RankPool, sync: dict[str, Any], dense_above: float
) -> None:
    got = ranks.run(train_words, layout=HOSTS, args=({**sync, "sparse": {"dense_above": dense_above}},))
    expected = torch.zeros(200, 7)
    for rank in range(2):
        for step in range(STEPS):
            rows, values = words_of(rank, step)
            expected.index_add_(0, rows, values / 2)
    for weight in got:
        torch.testing.assert_close(-weight, expected)
