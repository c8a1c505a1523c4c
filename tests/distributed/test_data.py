"""What each rank reads: sampler injection, unequal numbers of batches, several loaders; and that nobody hangs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_dist.errors import UnevenInputsError
from tests.distributed.compared import strategies
from tests.distributed.lightning_runs import (
    ListDataset,
    OddModule,
    loader_of,
    make_batches,
    mse,
    sgd,
    strategy_of,
    trainer_on_pool,
)
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

COUNTS = [5, 3, 4]  # batches by rank


class Indices(pl.LightningModule):
    """Notes which samples it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: dict[str, list[int]] = {"train": [], "val": [], "test": [], "predict": []}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen["train"] += batch.flatten().int().tolist()
        return self.layer(batch).mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.seen["val"] += batch.flatten().int().tolist()

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.seen["test"] += batch.flatten().int().tolist()

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.seen["predict"] += batch.flatten().int().tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def read_with_sampler(context: RankContext) -> list[dict[str, list[int]]]:
    results = []
    for strategy in strategies():
        loader: DataLoader[Any] = DataLoader(ListDataset([torch.tensor([float(i)]) for i in range(12)]), batch_size=2)
        module = Indices()
        trainer = trainer_on_pool(context, strategy, use_distributed_sampler=True, max_epochs=2)
        pl.seed_everything(3, verbose=False)
        trainer.fit(module, loader, loader)
        trainer.test(module, loader, verbose=False)
        trainer.predict(module, loader, return_predictions=False)
        results.append(module.seen)
    return results


def test_sampler_is_injected_as_under_ddp(ranks: RankPool) -> None:
    got = ranks.run(read_with_sampler, world_size=3)
    for ours, ddp in got:
        assert ours == ddp
    for epoch in (0, 1):
        seen = [ours["train"][4 * epoch : 4 * epoch + 4] for ours, _ in got]
        assert sorted(chain.from_iterable(seen)) == list(range(12)), "each sample once an epoch"
    assert got[0][0]["train"][:4] != got[0][0]["train"][4:], "another order in another epoch"
    for stage in ("test", "predict"):
        assert sorted(chain.from_iterable(ours[stage] for ours, _ in got)) == list(range(12))


class Stream(IterableDataset[Any]):
    """Ready batches without a length."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class FalselySized(Stream):
    """Says that it has the same length on all ranks."""

    def __len__(self) -> int:
        return max(COUNTS)


def uneven_loader(context: RankContext, kind: str) -> Any:
    batches = make_batches(context.world_size, COUNTS[context.rank], seed=context.rank)[context.rank]
    if kind == "sized":
        return loader_of(batches)
    if kind == "iterable":
        return DataLoader(Stream(batches), batch_size=None)
    if kind == "falsely sized":
        return DataLoader(FalselySized(batches), batch_size=None)
    if kind == "generator only":
        return Stream(batches)
    raise AssertionError(kind)


KINDS = ["sized", "iterable", "falsely sized", "generator only"]


def train_uneven(context: RankContext, kind: str, policy: str) -> tuple[int, int, str]:
    module = OddModule(sgd)
    trainer = trainer_on_pool(context, strategy_of(parallel={"uneven_inputs": policy}), max_epochs=2)
    error = ""
    try:
        trainer.fit(module, uneven_loader(context, kind))
    except UnevenInputsError as raised:
        error = str(raised)
    return trainer.global_step, len(module.losses), error


@pytest.mark.parametrize("kind", KINDS)
def test_unequal_batches_stop_all_ranks_at_the_same_step(ranks: RankPool, kind: str) -> None:
    assert ranks.run(train_uneven, world_size=3, args=(kind, "stop"), deadline_s=30) == [(6, 6, "")] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_unequal_batches_are_a_named_error_if_asked(ranks: RankPool, kind: str) -> None:
    got = ranks.run(train_uneven, world_size=3, args=(kind, "error"), deadline_s=30)
    assert len({steps for steps, _, _ in got}) == 1
    for (
        steps,
        _,
        error,
    ) in got:  # before training if lengths are known, else at the shortest's end or, prefetched, before
        assert steps == 0 if kind == "sized" else steps in (2, 3)
        assert "parallel.uneven_inputs=stop" in error
        assert "rank 1: 3" in error


class TwoLoaders(OddModule):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        return sum(mse(self.net, part) for part in parts if part is not None)  # type: ignore[return-value]


def train_combined(context: RankContext, shape: str) -> int:
    pair = [uneven_loader(context, "sized"), uneven_loader(context, "iterable")]
    even = loader_of(make_batches(context.world_size, 2)[context.rank])
    loaders: dict[str, Any] = {
        "list": pair,
        "dict": {"x": pair[0], "y": even},
        "min_size": CombinedLoader({"x": pair[1], "y": pair[0]}, "min_size"),
        "max_size": CombinedLoader([pair[0], even], "max_size"),
    }
    trainer = trainer_on_pool(context, strategy_of(), max_epochs=1)
    trainer.fit(TwoLoaders(sgd), loaders[shape])
    return trainer.global_step


@pytest.mark.parametrize("shape", ["list", "dict", "min_size", "max_size"])
def test_combined_loaders_stop_together(ranks: RankPool, shape: str) -> None:
    assert ranks.run(train_combined, world_size=3, args=(shape,), deadline_s=30) == [3, 3, 3]


def validate_uneven(context: RankContext) -> list[float]:
    """In fit, with BatchNorm buffers to synchronise, and alone."""
    module = OddModule(sgd, make_model=lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3)))
    trainer = trainer_on_pool(context, strategy_of(), num_sanity_val_steps=2)
    train = loader_of(make_batches(context.world_size, 2)[context.rank])
    val = uneven_loader(context, "sized")
    trainer.fit(module, train, val)
    first = float(trainer.callback_metrics["val_loss"])
    trainer.validate(module, val, verbose=False)
    return [first, float(trainer.callback_metrics["val_loss"])]


def test_validation_takes_unequal_batches(ranks: RankPool) -> None:
    got = ranks.run(validate_uneven, world_size=3, deadline_s=30)
    assert got[0] == got[1] == got[2]
    assert got[0][0] == pytest.approx(got[0][1])


def train_with_lasting_workers(context: RankContext) -> tuple[int, int]:
    """Two fits over one loader whose workers live on between epochs."""
    batches = make_batches(context.world_size, COUNTS[context.rank], seed=context.rank)[context.rank]
    loader: DataLoader[Any] = DataLoader(
        Stream(batches), batch_size=None, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    steps = []
    for _ in range(2):
        trainer = trainer_on_pool(context, strategy_of(), max_epochs=2)
        trainer.fit(OddModule(sgd), loader)
        steps.append(trainer.global_step)
    return steps[0], steps[1]


def test_lasting_workers_end_with_the_fit(ranks: RankPool) -> None:
    assert ranks.run(train_with_lasting_workers, world_size=2, deadline_s=40) == [(6, 6)] * 2


class AsksEarly(OddModule):
    """Asks for the number of steps before the strategy is set up, which makes Lightning set up the loaders."""

    def setup(self, stage: str) -> None:
        self.asked = self.trainer.estimated_stepping_batches


def ask_early(context: RankContext) -> tuple[int, int]:
    module = AsksEarly(sgd)
    trainer = trainer_on_pool(context, strategy_of(), max_epochs=2)
    trainer.fit(module, uneven_loader(context, "sized"))
    return int(module.asked), trainer.global_step


def test_number_of_steps_is_known_in_setup(ranks: RankPool) -> None:
    assert ranks.run(ask_early, world_size=3, deadline_s=30) == [(6, 6)] * 3
