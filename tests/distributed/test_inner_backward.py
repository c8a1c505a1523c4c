"""A backward inside a step, or inside a backward: the outer one alone sums gradients, and equals one process."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.lightning_runs import Batch, loader_of, make_batches, mse, strategy_of, trainer_on_pool
from tests.distributed.sharded_runs import LAYOUTS, MODES, NETS, Case, Outcome, check, in_modes, train
from tests.distributed.test_optimization import ByHand
from tests.distributed.test_sharded_refusals import error_of
from tests.support.ranks import RankPool
from tests.support.reference import assert_same
from tests.support.tasks import RankContext


class ReentrantNet(nn.Module):
    """Recomputes its blocks, of which one is called twice, in backward passes inside the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7) for _ in range(3)])
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for index in (0, 1, 2, 1):
            x = torch.tanh(checkpoint(self.blocks[index], x, use_reentrant=True))
        return self.last(x)


NETS["reentrant"] = ReentrantNet


@dataclass(frozen=True)
class Adversarial(Case):
    """Trains on inputs moved along the sign of their gradient."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).pow(2).sum(), x)
        return mse(model, (batch[0] + 0.1 * slope.sign(), batch[1]))


@dataclass(frozen=True)
class Penalised(Case):
    """Its loss holds a gradient with respect to the inputs of the same outputs."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        x = batch[0].clone().requires_grad_()
        outputs = model(x)
        (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        return nn.functional.mse_loss(outputs, batch[1]) + slope.pow(2).mean()


CASES = [Adversarial(), Penalised(), Case(net="reentrant")]


def train_each(context: RankContext, cases: list[Case]) -> list[Outcome]:
    return [train(context, case) for case in cases]


@in_modes("zero3", "hsdp")
def test_backward_passes_inside_a_step_equal_one_process(ranks: RankPool, mode: str) -> None:
    cases = [dataclasses.replace(case, strategy=MODES[mode], accumulation=2) for case in CASES]
    layout = LAYOUTS["2+2" if mode in ("hpz", "hsdp") else "1+1"]
    outcomes = ranks.run(train_each, layout=layout, args=(cases,))
    for index, case in enumerate(cases):
        check([each[index] for each in outcomes], case)


# -- by hand -----------------------------------------------------------------------------------------------------------


class PenalisedByHand(ByHand):
    """A gradient with respect to inputs, of another forward than the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        self.manual_backward(mse(self.net, batch) + slope.pow(2).mean())
        self.optimizers().step()
        self.optimizers().zero_grad()


class TwoBackwards(ByHand):
    """Two losses of one graph, in which the network is called twice."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        outputs = self.net(batch[0]) + self.net(batch[0] * 2)
        self.manual_backward(outputs.mean(), retain_graph=True)
        self.manual_backward(outputs.pow(2).mean())
        self.optimizers().step()
        self.optimizers().zero_grad()


KINDS = [PenalisedByHand, TwoBackwards]


def train_by_hand(context: RankContext, strategy: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    weights = []
    for kind in KINDS:
        module = kind()
        batches = make_batches(context.world_size, 4)[context.rank]
        trainer_on_pool(context, strategy_of(**strategy)).fit(module, loader_of(batches))
        weights.append(module.state_dict())
    return weights


def in_one_process(kind: type[ByHand], world_size: int) -> dict[str, torch.Tensor]:
    module = kind()
    optimizer = module.configure_optimizers()
    module.optimizers = lambda: optimizer  # type: ignore[method-assign, assignment]
    module.manual_backward = lambda loss, **options: loss.backward(**options)  # type: ignore[method-assign]
    for batches in zip(*make_batches(world_size, 4), strict=True):
        module.training_step(tuple(map(torch.cat, zip(*batches, strict=True))), 0)
    return module.state_dict()


@in_modes("zero2", "zero3")
def test_penalties_and_several_backward_passes_by_hand_equal_one_process(ranks: RankPool, mode: str) -> None:
    for found in ranks.run(train_by_hand, layout=LAYOUTS["1+1"], args=(MODES[mode],)):
        for kind, weights in zip(KINDS, found, strict=True):
            assert_same(weights, in_one_process(kind, 2), atol=1e-6)


class Aside(ByHand):
    """Starts its backward by itself."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        mse(self.net, batch).backward()
        self.optimizers().step()


@pytest.mark.parametrize("mode", ["zero1", "zero3"])
def test_a_backward_of_ones_own_is_refused(ranks: RankPool, mode: str) -> None:
    for said in ranks.run(error_of, layout=LAYOUTS["1+1"], args=(MODES[mode], Aside), fresh=True):
        assert said.startswith("UnsummedGradientError")
        assert "self.manual_backward(loss) in place of loss.backward()" in said
