"""Trainings of sharded models on the ranks of a pool, and the same in one process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from tests.distributed.lightning_runs import (
    Batch,
    adamw,
    loader_of,
    make_batches,
    mse,
    sgd,
    strategy_of,
    trainer_on_pool,
)
from tests.support.reference import ReferenceStep, assert_same, train_reference
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

STEPS = 6


LAYOUTS: dict[str, dict[str, list[int]]] = {
    "1": {"a": [0]},
    "2": {"a": [0, 1]},
    "3": {"a": [0, 1, 2]},
    "2+2": {"a": [0, 1], "b": [2, 3]},
    "3+1": {"a": [0, 1, 2], "b": [3]},
    "cyclic": {"a": [0, 2], "b": [1, 3]},
    "1+1": {"a": [0], "b": [1]},
}
MODES: dict[str, dict[str, Any]] = {
    "zero1": {"parallel": "zero1"},
    "zero2": {"parallel": "zero2"},
    "zero3": {"parallel": "zero3"},
    "hpz": {"parallel": {"mode": "zero3", "secondary_shard": "host"}},
    "hsdp": {"parallel": "hsdp"},
}


def in_modes(*always: str) -> Any:
    """Parametrises ``mode``, for tests of what users do with a sharded model: these run always, all in the sweep.

    What differs is whether backward gathers (``zero3``), and whether there are two axes (``hsdp``); ``zero1`` is
    ``zero2`` without its sums in each micro-batch, ``hpz`` gathers from another place in backward.
    :mod:`tests.distributed.test_zero` trains in all of them.
    """
    return pytest.mark.parametrize("mode", sampled({mode: (mode,) for mode in MODES}, always))


def in_modes_with(name: str, cases: Mapping[str, Any], always: Mapping[str, Collection[str]]) -> Any:
    """Parametrises ``mode`` and ``name`` by all their pairs.

    Args:
        name: The other parameter.
        cases: Its values, by the name in the test's id.
        always: Case -> modes in which it runs always.
    """
    pairs = {f"{mode}-{case}": (mode, value) for case, value in cases.items() for mode in MODES}
    ids = [f"{mode}-{case}" for case, modes in always.items() for mode in modes]
    return pytest.mark.parametrize(("mode", name), sampled(pairs, ids))


class OddNet(nn.Module):
    """7 -> 13 -> 5 -> 3 with parameters of one value and of no dimension: nothing divides by the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 13), nn.Linear(13, 5), nn.Linear(5, 3)])
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x) * self.gain + self.shift


class TiedNet(nn.Module):
    """Embeds the sign of the inputs; the last layer is the embedding again, which is not the first parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.blocks = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        self.embedding = nn.Embedding(3, 5)
        self.head = nn.Linear(5, 3, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        signs = (x[:, 0] > 0).long()
        return self.head(torch.tanh(self.blocks(self.first(x))) + self.embedding(signs))


class FrozenNet(nn.Module):
    """A frozen first block, a frozen parameter in another, BatchNorm, and a block used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 7)])
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 3)
        self.blocks[0].requires_grad_(False)
        self.blocks[1].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.blocks[1](self.blocks[0](x)))
        return self.last(self.blocks[2](torch.tanh(self.blocks[2](x))))


class SometimesNet(nn.Module):
    """A block that is used where the first input is positive, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7) for _ in range(4)])
        self.never = nn.Linear(7, 7)
        self.unused = nn.Parameter(torch.tensor(2.0))
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.blocks[0](x))
        if x[0, 0] > 0:
            x = torch.tanh(self.blocks[1](x))
        return self.last(self.blocks[3](torch.tanh(self.blocks[2](x))))


class FormatsNet(nn.Module):
    """Convolutions in channels_last, a transposed weight, parameters without values."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(2, 5, 2), nn.Conv2d(5, 4, 2)).to(memory_format=torch.channels_last)
        self.last = nn.Linear(4, 3)
        self.last.weight = nn.Parameter(torch.randn(4, 3).t())
        self.none = nn.Parameter(torch.empty(0))
        self.last.columns = nn.Parameter(torch.empty(3, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = nn.functional.pad(x, (0, 11)).view(-1, 2, 3, 3)
        return self.last(self.convs(images).flatten(1)) + self.none.sum() + self.last.columns.sum()


NETS: dict[str, Callable[[], nn.Module]] = {
    "odd": OddNet,
    "tied": TiedNet,
    "frozen": FrozenNet,
    "sometimes": SometimesNet,
    "formats": FormatsNet,
}
OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW that decays matrices only."""
    matrices = [p for p in parameters if p.dim() > 1]
    rest = [p for p in parameters if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


OPTIMIZERS["two groups"] = two_groups


class RowsAndColumns(torch.optim.Optimizer):
    """Scales gradients by running means over rows and over columns: its state has other shapes than its parameters."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state, gradient = self.state[parameter], parameter.grad
            rows = gradient.flatten(1).abs().mean(1, keepdim=True) if gradient.dim() > 1 else gradient.abs()
            columns = gradient.abs().sum(0, keepdim=True)
            if isinstance(columns, DTensor):
                columns = columns.redistribute(placements=[Replicate()])
            for name, mean in (("rows", rows), ("columns", columns)):
                state[name] = 0.5 * state[name] + 0.5 * mean if name in state else mean
            parameter.sub_(gradient / (state["rows"] + state["columns"] + 0.1), alpha=0.05)
        return loss


OPTIMIZERS["rows and columns"] = RowsAndColumns
OPTIMIZERS["adafactor"] = torch.optim.Adafactor


@dataclass(frozen=True)
class Case:
    """What is trained, and how.

    Attributes:
        net: Name in :data:`NETS`.
        optimizer: Name in :data:`OPTIMIZERS`.
        strategy: Arguments of the strategy.
        trainer: Arguments of the Trainer.
        accumulation: Micro-batches a step.
        twice: Whether a step computes two losses, one after the other, before the backward.
    """

    net: str = "odd"
    optimizer: str = "sgd"
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    twice: bool = False

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        if not self.twice:
            return mse(model, batch)
        return 0.5 * (mse(model, batch) + mse(model, (batch[0].flip(0) * 0.5, batch[1])))


class CaseModule(pl.LightningModule):
    """Trains the net of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = NETS[case.net]()
        self.case = case
        self.losses: list[float] = []
        self.gradients: list[dict[str, torch.Tensor | None]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.case.loss(self.net, batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", mse(self.net, batch), sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.case.optimizer]([p for p in self.net.parameters() if p.requires_grad])


@dataclass(frozen=True)
class Outcome:
    """What a fit left on a rank.

    Attributes:
        weights: The net's ``state_dict()``.
        losses: Of each micro-batch.
        optimizer_state: Parameter name -> entries, as a checkpoint holds them; empty but on rank 0.
        kinds: Names of the types of the parameters after the fit.
    """

    weights: dict[str, torch.Tensor]
    losses: list[float]
    optimizer_state: dict[str, dict[str, Any]]
    kinds: set[str]


class KeepState(pl.Callback):
    """Reads the optimizer's state as a checkpoint does, at the end of training."""

    def __init__(self) -> None:
        self.states: dict[int, dict[str, Any]] = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.states = trainer.strategy.optimizer_state(trainer.optimizers[0])["state"]


def train(context: RankContext, case: Case) -> Outcome:
    """Train on this rank."""
    batches = make_batches(context.world_size, STEPS * case.accumulation)[context.rank]
    module, keep = CaseModule(case), KeepState()
    trainer = trainer_on_pool(
        context,
        strategy_of(**case.strategy),
        callbacks=[keep],
        accumulate_grad_batches=case.accumulation,
        **case.trainer,
    )
    trainer.fit(module, loader_of(batches))
    weights = {name: value.detach().clone() for name, value in module.net.state_dict().items()}
    kinds = {type(p).__name__ for p in module.net.parameters()}
    return Outcome(weights, module.losses, _by_name(module, keep.states) if context.rank == 0 else {}, kinds)


def _by_name(module: CaseModule, states: dict[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    optimizer = module.configure_optimizers()
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    names = {id(p): name for name, p in module.net.named_parameters()}
    return {names[id(listed[index])]: dict(entries) for index, entries in states.items()}


def reference(case: Case, world_size: int) -> list[ReferenceStep]:
    """The same in one process."""
    return train_reference(
        make_model=NETS[case.net],
        make_optimizer=OPTIMIZERS[case.optimizer],
        batches=make_batches(world_size, STEPS * case.accumulation),
        loss_of=case.loss,
        accumulation=case.accumulation,
        clip_norm=case.trainer.get("gradient_clip_val")
        if case.trainer.get("gradient_clip_algorithm", "norm") == "norm"
        else None,
        clip_value=case.trainer.get("gradient_clip_val")
        if case.trainer.get("gradient_clip_algorithm") == "value"
        else None,
    )


def check(outcomes: list[Outcome], case: Case, *, atol: float = 1e-6) -> None:
    """All ranks equal the reference, a few roundings of fp32 values near 1 apart; a loss may be larger, hence rtol."""
    steps = reference(case, len(outcomes))
    for rank, outcome in enumerate(outcomes):
        names = outcome.weights if rank == 0 else {n for n in outcome.weights if ".running_" not in n}
        assert_same({n: outcome.weights[n] for n in names}, {n: steps[-1].weights[n] for n in names}, atol=atol)
        expected = [loss[rank] for step in steps for loss in step.rank_losses]
        torch.testing.assert_close(torch.tensor(outcome.losses), torch.tensor(expected), rtol=3e-7, atol=atol)
        assert outcome.kinds == {"Parameter"}  # the module is whole again
    assert_same(outcomes[0].optimizer_state, steps[-1].optimizer_state, atol=atol)
