"""Manual optimization, compiled modules, mixed precision and clipping, against Lightning's own ddp in the same run."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from tests.distributed.compared import Pair, check_equal, fit_both
from tests.distributed.lightning_runs import (
    OddModule,
    loader_of,
    make_batches,
    mse,
    odd_model,
    sgd,
    strategy_of,
    trainer_on_pool,
)
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

BATCHES = 6
LAYOUT = {"a": [0, 1], "b": [2]}


class Adversaries(pl.LightningModule):
    """Two networks, two optimizers, each trained by its own loss in each step.

    Args:
        toggled: Whether parameters of the other network are frozen meanwhile.
    """

    def __init__(self, toggled: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.maker = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
        self.judge = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 1))
        self.losses: list[float] = []
        self.toggled = toggled

    def step_with(self, optimizer: Any, loss_of: Any) -> None:
        if self.toggled:
            self.toggle_optimizer(optimizer)
        loss = loss_of()
        self.losses.append(float(loss.detach()))
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
        if self.toggled:
            self.untoggle_optimizer(optimizer)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, real = batch
        of_maker, of_judge = self.optimizers()
        self.step_with(of_maker, lambda: -self.judge(self.maker(x)).mean())
        self.step_with(of_judge, lambda: (self.judge(self.maker(x).detach()) - self.judge(real)).mean())
        self.log("last_loss", self.losses[-1], sync_dist=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (self.maker, self.judge)]


class OneOfSeveral(Adversaries):
    """Accumulates by hand over two batches, with one network."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_maker, _ = self.optimizers()
        with of_maker.toggle_model(sync_grad=batch_idx % 2 == 1):
            loss = nn.functional.mse_loss(self.maker(batch[0]), batch[1])
            self.losses.append(float(loss.detach()))
            self.manual_backward(loss)
        if batch_idx % 2 == 1:
            of_maker.step()
            of_maker.zero_grad()


class Untoggled(Adversaries):
    def __init__(self) -> None:
        super().__init__(toggled=False)


def train_by_hand(context: RankContext, kind: type[Adversaries], strategy: dict[str, Any]) -> Pair:
    batches = make_batches(context.world_size, BATCHES)[context.rank]
    return fit_both(context, kind, lambda: loader_of(batches), strategy=strategy, max_epochs=2)


FIND: dict[str, Any] = {"find_unused_parameters": True, "sync": {"bucket_bytes": 1024, "chunk_bytes": 4096}}


@pytest.mark.parametrize(("kind", "strategy"), [(Adversaries, FIND), (Untoggled, FIND), (OneOfSeveral, FIND)])
def test_manual_optimization_equals_ddp(ranks: RankPool, kind: type[Adversaries], strategy: dict[str, Any]) -> None:
    check_equal(ranks.run(train_by_hand, layout=LAYOUT, args=(kind, strategy)))


class ByHand(OddModule):
    """One optimizer, by hand, everything used."""

    def __init__(self) -> None:
        super().__init__(sgd)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss = mse(self.net, batch)
        self.losses.append(float(loss.detach()))
        self.manual_backward(loss)
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("strategy", [{}, {"static_graph": True}], ids=["plain", "static_graph"])
def test_one_optimizer_by_hand_equals_ddp(ranks: RankPool, strategy: dict[str, Any]) -> None:
    check_equal(ranks.run(train_by_hand, layout=LAYOUT, args=(ByHand, strategy)))


def compiled_blocks() -> nn.Module:
    model = odd_model()
    for index in (0, 2, 4):
        model[index] = torch.compile(model[index], backend="eager")  # type: ignore[assignment]
    return model


def make_compiled_blocks() -> pl.LightningModule:
    return OddModule(sgd, make_model=compiled_blocks)


class Quiet(OddModule):
    """Does not turn the loss into a number, which would end the compiled graph."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return mse(self.net, batch)


def make_compiled_module() -> Any:
    return torch.compile(Quiet(sgd), backend="aot_eager")


def train_compiled(context: RankContext, whole: bool) -> Pair:
    batches = make_batches(context.world_size, BATCHES)[context.rank]
    make = make_compiled_module if whole else make_compiled_blocks
    loaders = {"train_dataloaders": loader_of(batches), "val_dataloaders": loader_of(batches[:2])}
    return fit_both(context, make, lambda: loaders, max_epochs=2)


@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "module"])
def test_compiled_equals_ddp(ranks: RankPool, whole: bool) -> None:
    check_equal(ranks.run(train_compiled, world_size=2, args=(whole,), fresh=True))  # a compiler leaves threads


class Scaled(OddModule):
    """Logs the sum of scales; on rank 1 alone the third batch overflows."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (float("inf") if batch_idx == 2 and self.global_rank == 1 else 1.0)

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("scales", self.trainer.precision_plugin.scaler.get_scale(), on_epoch=True, reduce_fx="sum")


def make_scaled() -> pl.LightningModule:
    return Scaled(sgd)


def make_plain() -> pl.LightningModule:
    return OddModule(sgd)


def make_scaler() -> list[Any]:
    return [MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))]


def train_scaled(context: RankContext) -> Pair:
    batches = make_batches(context.world_size, BATCHES)[context.rank]
    return fit_both(context, make_scaled, lambda: loader_of(batches), make_plugins=make_scaler)


def test_fp16_overflow_on_one_rank_is_skipped_by_all(ranks: RankPool) -> None:
    pairs = ranks.run(train_scaled, world_size=2)
    check_equal(pairs)
    for pair in pairs:
        assert pair.ours.logged["scales"] == 2 * 1024 + 4 * 512


def train_precisely(context: RankContext, trainer: dict[str, Any]) -> Pair:
    batches = make_batches(context.world_size, BATCHES)[context.rank]
    return fit_both(context, make_plain, lambda: loader_of(batches), max_epochs=2, **trainer)


@pytest.mark.parametrize(
    "trainer",
    [
        {"precision": "bf16-mixed"},
        {"precision": "bf16-mixed", "accumulate_grad_batches": 4, "gradient_clip_val": 0.1},
        {"precision": "64-true"},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ],
    ids=lambda trainer: "-".join(map(str, trainer.values())),
)
def test_precision_and_clipping_equal_ddp(ranks: RankPool, trainer: dict[str, Any]) -> None:
    check_equal(ranks.run(train_precisely, layout=LAYOUT, args=(trainer,)))


class Strict(OddModule):
    """Refuses a gradient that is not finite; rank 1 alone makes one, in the third batch."""

    def __init__(self) -> None:
        super().__init__(sgd)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = mse(self.net, batch)
        return loss * (float("nan") if batch_idx == 2 and self.global_rank == 1 else 1.0)

    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_(self.parameters(), 1.0, error_if_nonfinite=True)


def train_strictly(context: RankContext) -> int:
    module = Strict()
    trainer = trainer_on_pool(context, strategy_of())
    with pytest.raises(RuntimeError, match="non-finite"):
        trainer.fit(module, loader_of(make_batches(context.world_size, BATCHES)[context.rank]))
    return trainer.global_step


def test_error_if_nonfinite_is_raised_on_all_ranks_at_the_same_step(ranks: RankPool) -> None:
    assert ranks.run(train_strictly, layout=LAYOUT) == [2, 2, 2]
