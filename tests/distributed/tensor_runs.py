"""Trainings of modules whose layers are split, on the ranks of a pool, and the same in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.distributed.lightning_runs import loader_of, strategy_of, trainer_on_pool
from tests.distributed.sharded_runs import KeepState
from tests.distributed.split_models import MODELS, loss_of, make_batches, make_optimizer
from tests.support.reference import ReferenceStep, train_reference
from tests.support.tasks import RankContext

STEPS = 6


@dataclass(frozen=True)
class SplitCase:
    """What is trained, and how.

    Attributes:
        model: Name in :data:`MODELS`.
        optimizer: As :func:`make_optimizer` takes it.
        parallel: Options of the group ``parallel``.
        sync: Options of the group ``sync``.
        trainer: Arguments of the Trainer.
        accumulation: Micro-batches a step.
        alike: Whether all ranks read the same data, so that their number does not matter.
    """

    model: str = "gpt"
    optimizer: str = "sgd"
    parallel: dict[str, Any] = field(default_factory=lambda: {"mode": "tensor"})
    sync: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    alike: bool = False


class SplitLearner(pl.LightningModule):
    """Trains a model of ``split_models``; takes the part of the data that the strategy gives it."""

    def __init__(self, case: SplitCase) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = MODELS[case.model]()
        self.case = case
        self.losses: list[float] = []

    def _batches(self, number: int, *, seed: int = 0) -> DataLoader[Any]:
        return loader_of(make_batches(self.case.model, number, seed=seed + self.data_rank))

    @property
    def data_rank(self) -> int:
        """Which part of the data this rank reads."""
        return 0 if self.case.alike else int(self.trainer.distributed_sampler_kwargs["rank"])

    def train_dataloader(self) -> DataLoader[Any]:
        return self._batches(STEPS * self.case.accumulation)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._batches(2, seed=50)

    predict_dataloader = test_dataloader = val_dataloader

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = loss_of(self.net, batch)
        self.losses.append(float(loss.detach()))
        self.log("last", loss, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.net, batch), sync_dist=True)
        self.log("val_count", float(len(batch[0])), sync_dist=True, reduce_fx="sum", on_epoch=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.case.optimizer, self.net.parameters())


@dataclass(frozen=True)
class SplitOutcome:
    """What a fit left on a rank.

    Attributes:
        weights: The net's ``state_dict()``, after the fit.
        losses: Of each micro-batch.
        data_rank: Which part of the data the rank read.
        optimizer_state: Parameter name -> entries, as a checkpoint holds them; values on rank 0 only.
        kinds: Names of the types of the parameters after the fit.
    """

    weights: dict[str, torch.Tensor]
    losses: list[float]
    data_rank: int
    optimizer_state: dict[str, dict[str, Any]]
    kinds: set[str]


def strategy_for(case: SplitCase) -> Any:
    return strategy_of(parallel=case.parallel, sync=case.sync)


class KeepDataRank(pl.Callback):
    """Which part of the data the rank reads is known while the ranks are together."""

    rank = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.rank = int(trainer.distributed_sampler_kwargs["rank"])


def train(context: RankContext, case: SplitCase) -> SplitOutcome:
    """Train on this rank."""
    module, keep, data_rank = SplitLearner(case), KeepState(), KeepDataRank()
    trainer = trainer_on_pool(
        context,
        strategy_for(case),
        callbacks=[keep, data_rank],
        accumulate_grad_batches=case.accumulation,
        limit_val_batches=0,
        **case.trainer,
    )
    trainer.fit(module)
    names = [name for name, _ in module.net.named_parameters()]
    states = {names[index]: dict(entries) for index, entries in keep.states.items()} if context.rank == 0 else {}
    weights = {name: value.detach().clone() for name, value in module.net.state_dict().items()}
    return SplitOutcome(
        weights, module.losses, data_rank.rank, states, {type(p).__name__ for p in module.net.parameters()}
    )


def reference(case: SplitCase, data_ranks: int) -> list[ReferenceStep]:
    """The same in one process."""
    clip = case.trainer.get("gradient_clip_val")
    by_value = case.trainer.get("gradient_clip_algorithm") == "value"
    return train_reference(
        make_model=MODELS[case.model],
        make_optimizer=lambda parameters: make_optimizer(case.optimizer, parameters),
        batches=[make_batches(case.model, STEPS * case.accumulation, seed=rank) for rank in range(data_ranks)],
        loss_of=loss_of,
        accumulation=case.accumulation,
        clip_norm=None if by_value else clip,
        clip_value=clip if by_value else None,
    )
