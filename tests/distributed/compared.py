"""The same training under our strategy and under Lightning's own ddp, one after the other on the same ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy

from tests.distributed.lightning_runs import PoolEnvironment, strategy_of, trainer_on_pool
from tests.support.reference import assert_same, differences
from tests.support.tasks import RankContext


@dataclass(frozen=True)
class Trained:
    """What a fit left on one rank.

    Attributes:
        weights: Parameters and buffers.
        losses: The module's ``losses``, if it keeps them.
        logged: ``trainer.callback_metrics``.
        global_step: Optimizer steps.
    """

    weights: dict[str, torch.Tensor]
    losses: list[float]
    logged: dict[str, float]
    global_step: int

    @classmethod
    def of(cls, trainer: pl.Trainer, module: pl.LightningModule) -> Trained:
        weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return cls(weights, list(getattr(module, "losses", [])), logged, trainer.global_step)


@dataclass(frozen=True)
class Pair:
    """Both runs of one rank."""

    ours: Trained
    ddp: Trained


def strategies(sync: dict[str, Any] | None = None, **ddp_arguments: Any) -> list[Strategy]:
    """Ours, then ddp."""
    return [
        strategy_of(sync=sync or {}, **ddp_arguments),
        DDPStrategy(process_group_backend="gloo", **ddp_arguments),
    ]


def fit_both(
    context: RankContext,
    make_module: Callable[[], pl.LightningModule],
    make_loader: Callable[[], Any],
    *,
    strategy: dict[str, Any] | None = None,
    ddp_strategy: dict[str, Any] | None = None,
    make_callbacks: Callable[[], list[pl.Callback]] = list,
    make_plugins: Callable[[], list[Any]] = list,
    **trainer: Any,
) -> Pair:
    """Fit afresh under each strategy.

    Args:
        context: The rank.
        make_module: Makes the module, the same weights each time.
        make_loader: Makes this rank's loaders: one, or ``{"train_dataloaders": ..., "val_dataloaders": ...}``.
        strategy: Arguments of both strategies.
        ddp_strategy: Arguments of ddp where they must be others.
        make_callbacks: Makes the callbacks.
        make_plugins: Makes plugins beside the environment's.
        **trainer: Arguments of the Trainer.
    """
    results = []
    ours = strategies(**(strategy or {}))[0]
    ddp = strategies(**(strategy or {} if ddp_strategy is None else ddp_strategy))[1]
    for each in (ours, ddp):
        torch.manual_seed(context.rank)  # what a model draws at random, it draws alike in both
        module = make_module()
        plugins = [PoolEnvironment(), *make_plugins()]
        run = trainer_on_pool(context, each, callbacks=make_callbacks(), plugins=plugins, **trainer)
        loaders = make_loader()
        run.fit(module, **(loaders if isinstance(loaders, dict) else {"train_dataloaders": loaders}))
        results.append(Trained.of(run, module))
    return Pair(*results)


def check_equal(pairs: list[Pair], *, atol: float = 1e-6, weights_alike: bool = True) -> None:
    """Ours equals ddp on every rank, up to another order of summation, and has trained at all; all ranks are alike.

    Args:
        pairs: By rank.
        atol: Largest absolute difference; the default is a few roundings of fp32 values near 1.
        weights_alike: Whether weights and buffers are the same bits on all ranks.
    """
    for rank, pair in enumerate(pairs):
        assert_same(pair.ours.weights, pair.ddp.weights, atol=atol)
        assert_same(pair.ours.logged, pair.ddp.logged, atol=atol)
        assert pair.ours.global_step == pair.ddp.global_step, f"rank {rank}"
        torch.testing.assert_close(torch.tensor(pair.ours.losses), torch.tensor(pair.ddp.losses), rtol=0, atol=atol)
        if weights_alike:
            assert not [name for name, size in differences(pair.ours.weights, pairs[0].ours.weights) if size > 0]
