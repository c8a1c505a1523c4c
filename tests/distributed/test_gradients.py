"""The gradient hook under every shape a model may have, against Lightning's own ddp in the same run."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from tests.distributed.compared import Pair, check_equal, fit_both
from tests.distributed.lightning_runs import loader_of, make_batches, strategy_of, trainer_on_pool
from tests.support.ranks import RankPool, RanksFailed
from tests.support.tasks import RankContext

BATCHES = 7
LAYOUT = {"a": [0, 1], "b": [2]}


class ShapedModule(pl.LightningModule):
    """7 features in, 3 out, by way of a few branches; each subclass uses them in its own way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(7, 11)
        self.left = nn.Linear(11, 11)
        self.right = nn.Linear(11, 11)
        self.head = nn.Linear(11, 3)
        self.losses: list[float] = []
        self.prepare()

    def prepare(self) -> None:
        """What a subclass changes."""

    def forward(self, x: torch.Tensor, batch_idx: int) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        return self.head(torch.tanh(self.left(x)) + torch.tanh(self.right(x)))  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self(batch[0], batch_idx), batch[1])
        self.losses.append(float(loss.detach()))
        self.log("loss", loss)
        self.log("mean_loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Unused(ShapedModule):
    def forward(self, x: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.head(torch.tanh(self.left(torch.tanh(self.stem(x)))))  # type: ignore[no-any-return]


class UsedOnSomeRanks(ShapedModule):
    """Rank r takes the left branch in step i if r + i is even; sometimes nobody takes the right one."""

    def forward(self, x: torch.Tensor, batch_idx: int) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        take_left = batch_idx % 3 == 0 or (self.global_rank + batch_idx) % 2 == 0
        return self.head(torch.tanh((self.left if take_left else self.right)(x)))  # type: ignore[no-any-return]


class OtherOrderOnOtherRanks(ShapedModule):
    """Gradients become ready in opposite order on odd ranks."""

    def forward(self, x: torch.Tensor, batch_idx: int) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        first, second = (self.left, self.right) if self.global_rank % 2 == 0 else (self.right, self.left)
        return self.head(torch.tanh(second(torch.tanh(first(x)))))  # type: ignore[no-any-return]


class Frozen(ShapedModule):
    def prepare(self) -> None:
        self.left.requires_grad_(False)


class Tied(ShapedModule):
    def prepare(self) -> None:
        self.right.weight = self.left.weight


class Buffered(ShapedModule):
    """BatchNorm before its statistics are used in evaluation, and a buffer of another type."""

    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(11)

    def forward(self, x: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.stem(x))) + self.left(self.right(self.stem(x))))  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0], 0), batch[1]), sync_dist=True)


class Sparse(ShapedModule):
    """Ranks touch different rows, some of them twice."""

    def prepare(self) -> None:
        self.rows = nn.Embedding(20, 11, sparse=True)
        self.bag = nn.EmbeddingBag(20, 11, sparse=True, mode="sum")

    def forward(self, x: torch.Tensor, batch_idx: int) -> torch.Tensor:
        rows = (torch.arange(len(x)) * (self.global_rank + 1) + batch_idx) % 17 // 2
        embedded = self.rows(rows) + self.bag(rows.unsqueeze(1))
        x = torch.tanh(self.stem(x)) + embedded
        return self.head(torch.tanh(self.left(x)) + self.right(x))  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)  # momentum does not take sparse gradients


def train(context: RankContext, kind: type[ShapedModule], strategy: dict[str, Any], trainer: dict[str, Any]) -> Pair:
    def loaders() -> dict[str, Any]:
        batches = make_batches(context.world_size, BATCHES)[context.rank]
        has_validation = "validation_step" in vars(kind)
        return {
            "train_dataloaders": loader_of(batches),
            "val_dataloaders": loader_of(batches[:2]) if has_validation else None,
        }

    # ddp fails an internal assert of torch 2.13 if it has a static graph and its first backward is not synchronised.
    accumulates = trainer["accumulate_grad_batches"] > 1
    ddp_strategy = FIND if accumulates and "static_graph" in strategy else strategy
    return fit_both(context, kind, loaders, strategy=strategy, ddp_strategy=ddp_strategy, max_epochs=2, **trainer)


SMALL_BUCKETS = {"sync": {"bucket_bytes": 1024, "chunk_bytes": 4096}}
FIND = {"find_unused_parameters": True}


def named(value: Any) -> str:
    """A parameter in the name of its test."""
    if isinstance(value, dict):
        return "+".join(key for key in value if key != "sync") or "plain"
    return value.__name__ if isinstance(value, type) else f"over {value}"


@pytest.mark.parametrize(
    ("kind", "strategy", "accumulation"),
    [
        (ShapedModule, {}, 3),
        (ShapedModule, SMALL_BUCKETS, 1),
        (ShapedModule, {"gradient_as_bucket_view": False, **SMALL_BUCKETS}, 3),
        (ShapedModule, {"static_graph": True, **SMALL_BUCKETS}, 1),
        (ShapedModule, {"static_graph": True, **SMALL_BUCKETS}, 3),
        (Unused, {**FIND, **SMALL_BUCKETS}, 3),
        (Unused, {"static_graph": True}, 3),
        (UsedOnSomeRanks, {**FIND, **SMALL_BUCKETS}, 1),
        (UsedOnSomeRanks, {**FIND, **SMALL_BUCKETS}, 3),
        (OtherOrderOnOtherRanks, SMALL_BUCKETS, 3),
        (OtherOrderOnOtherRanks, {**FIND, **SMALL_BUCKETS}, 1),
        (Frozen, SMALL_BUCKETS, 3),
        (Tied, SMALL_BUCKETS, 3),
        (Buffered, {}, 1),
        (Buffered, {}, 3),
        (Sparse, SMALL_BUCKETS, 1),
        (Sparse, {"sync": {"algorithm": "flat"}}, 3),
    ],
    ids=named,
)
def test_equals_ddp(ranks: RankPool, kind: type[ShapedModule], strategy: dict[str, Any], accumulation: int) -> None:
    arguments = (kind, strategy, {"accumulate_grad_batches": accumulation})
    # A BatchNorm's statistics are each rank's own after the last step, under ddp too.
    check_equal(ranks.run(train, layout=LAYOUT, args=arguments), weights_alike=kind is not Buffered)


def fit_ours(context: RankContext, kind: type[ShapedModule], strategy: dict[str, Any]) -> None:
    batches = make_batches(context.world_size, BATCHES)[context.rank]
    trainer_on_pool(context, strategy_of(**strategy)).fit(kind(), loader_of(batches))


@pytest.mark.parametrize("kind", [Unused, UsedOnSomeRanks])
def test_unused_parameters_are_an_error_that_names_the_option(ranks: RankPool, kind: type[ShapedModule]) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks.run(fit_ours, world_size=2, args=(kind, {}), fresh=True, deadline_s=30)
    assert "hierdist_find_unused_parameters_true" in str(caught.value)
    assert "hung" not in {failure.kind for failure in caught.value.failures}


def bucket_events(context: RankContext, accumulation: int) -> list[int]:
    """The step of each bucket that crossed between hosts."""
    strategy = strategy_of(topology={"host": str(context.rank)})
    crossed: list[int] = []
    strategy.events.add_sink(lambda event: crossed.append(event.step) if event.name == "comm.cross" else None)
    batches = make_batches(context.world_size, BATCHES)[context.rank]
    trainer_on_pool(context, strategy, accumulate_grad_batches=accumulation).fit(ShapedModule(), loader_of(batches))
    return crossed


@pytest.mark.parametrize(("accumulation", "steps"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 1, 2])])
def test_gradients_travel_once_a_window(ranks: RankPool, accumulation: int, steps: list[int]) -> None:
    for crossed in ranks.run(bucket_events, world_size=2, args=(accumulation,)):
        assert sorted(set(crossed)) == steps
        assert len(crossed) == len(steps), "one bucket, once a window"
