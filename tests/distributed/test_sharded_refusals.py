"""What cannot be done with a sharded model is an error that says what to write."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from tests.distributed.lightning_runs import OddModule, loader_of, make_batches, sgd, strategy_of, trainer_on_pool
from tests.distributed.sharded_runs import LAYOUTS, MODES, Case, CaseModule, in_modes
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

BATCHES = 6
TWO = LAYOUTS["1+1"]


def error_of(context: RankContext, strategy: dict[str, Any], kind: Callable[[], pl.LightningModule]) -> str:
    """What is said of a module that cannot be sharded."""
    trainer = trainer_on_pool(context, strategy_of(**strategy))
    module = kind()
    try:
        trainer.fit(module, loader_of(make_batches(context.world_size, BATCHES)[context.rank]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"trained to {[float(p.detach().sum()) for p in module.parameters()]}"


class EarlyOptimizer(OddModule):
    """Lists its parameters before they are sharded."""

    def __init__(self) -> None:
        super().__init__(sgd)
        self.listed = list(self.net.parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.listed)


@in_modes("zero3", "hsdp")
def test_parameters_listed_before_the_sharding_are_refused(ranks: RankPool, mode: str) -> None:
    for said in ranks.run(error_of, layout=TWO, args=(MODES[mode], EarlyOptimizer), fresh=True):
        assert "net.0.weight (and 5 more) as it was before" in said


class Repeating(OddModule):
    """In the second batch one rank calls a block once more than the others, each block as large as the next."""

    def __init__(self, rank: int) -> None:
        super().__init__(sgd, make_model=lambda: nn.Sequential(*(nn.Linear(7, 7) for _ in range(4)), nn.Linear(7, 3)))
        self.odd = rank

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = self.net[0](batch[0])
        if batch_idx == 1 and self.global_rank == self.odd:
            x = self.net[0](x)
        return nn.functional.mse_loss(self.net[1:](x), batch[1])


def test_a_block_called_more_often_on_one_rank_is_a_named_error(ranks: RankPool) -> None:
    said = ranks.run(error_of, layout=TWO, args=(MODES["zero3"], functools.partial(Repeating, 0)), fresh=True)
    assert said[1].startswith("CollectiveMismatchError")
    assert "of net.0" in said[1]
    assert "of net.2" in said[1], "which is gathered ahead"
    assert said[0].startswith("PeerLostError")


def refusal(context: RankContext, case: Case) -> str:
    """What a fit that cannot be says."""
    batches = make_batches(context.world_size, BATCHES)[context.rank]
    trainer = trainer_on_pool(context, strategy_of(**case.strategy))
    try:
        trainer.fit(CaseModule(case), loader_of(batches))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("mode", ["hpz", "hsdp"])
def test_uneven_hosts_are_refused(ranks: RankPool, mode: str) -> None:
    for said in ranks.run(refusal, layout=LAYOUTS["3+1"], args=(Case(strategy=MODES[mode]),)):
        assert said.startswith("PlacementError")
        assert "a, b have 3, 1" in said
        assert "parallel=zero3" in said


def test_an_optimizer_that_cannot_step_shards_is_refused(ranks: RankPool) -> None:
    case = Case(optimizer="adafactor", strategy=MODES["zero2"])
    for said in ranks.run(refusal, layout=TWO, args=(case,), fresh=True):
        assert said.startswith("CombinationError: Adafactor")
        assert "parallel=ddp" in said


@in_modes("zero2", "hsdp")
def test_unused_parameters_are_named(ranks: RankPool, mode: str) -> None:
    case = Case(net="sometimes", strategy=MODES[mode])
    said = ranks.run(refusal, layout=TWO, args=(case,), fresh=True)
    assert any("UnusedParametersError" in text and "net.never.weight" in text for text in said), said
    assert any("find_unused_parameters" in text for text in said)
