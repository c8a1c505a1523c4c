"""``sync.momentum_correction``: what hosts send is that of a single process with the formulas of the paper."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from tests.distributed.lightning_runs import loader_of, strategy_of, trainer_on_pool
from tests.distributed.test_checkpoint_layouts import SaveAtEnd
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

LAYOUTS: dict[str, dict[str, list[int]]] = {
    "2+2": {"a": [0, 1], "b": [2, 3]},
    "1+1": {"a": [0], "b": [1]},
    "3+1": {"a": [0, 1, 2], "b": [3]},
    "2": {"a": [0, 1]},
}
NUMEL, STEPS, RATIO, MOMENTUM = 4000, 8, 0.05, 0.9


class Vector(pl.LightningModule):
    """A loss whose gradient is the batch."""

    def __init__(self, momentum: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMEL))
        self._momentum = momentum

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.weight * batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0, momentum=self._momentum)


def gradient(rank: int, step: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1000 * rank + step))


def train(context: RankContext, parallel: str, sync: dict[str, Any], steps: list[int], folder: str) -> torch.Tensor:
    """Weights in the end; saved there, and begun where another run has saved."""
    module, path = Vector(), Path(folder)
    saved = sorted(path.glob("*.ckpt"))
    trainer = trainer_on_pool(
        context,
        strategy_of(parallel={"mode": parallel}, sync={"codec": "topk", "ratio": RATIO, **sync}, checkpoint="sharded"),
        max_epochs=len(saved) + 1,
        callbacks=[SaveAtEnd(path / f"{len(saved)}.ckpt")],
    )
    trainer.fit(
        module,
        loader_of([gradient(context.rank, step) for step in steps]),
        ckpt_path=saved[-1] if saved else None,
    )
    return module.weight.detach().clone()


class Owed:
    """What one host keeps of one piece that it sends: velocity and residue, as in the paper."""

    def __init__(self, length: int) -> None:
        self.velocity, self.residue = torch.zeros(length), torch.zeros(length)

    def sent(self, gradient: torch.Tensor) -> torch.Tensor:
        self.velocity = MOMENTUM * self.velocity + gradient
        self.residue = self.residue + self.velocity
        places = self.residue.abs().topk(max(1, -int(-RATIO * len(gradient) // 1))).indices
        sent = torch.zeros_like(gradient).index_copy_(0, places, self.residue[places])
        self.velocity[places] = 0
        self.residue[places] = 0
        return sent


class Owner:
    """What the owner of a piece keeps: the velocity of its own gradient, the residue of the sum."""

    def __init__(self, length: int) -> None:
        self.velocity, self.residue = torch.zeros(length), torch.zeros(length)

    def applied(self, own: torch.Tensor, others: list[torch.Tensor], count: int, encodes: bool) -> torch.Tensor:
        self.velocity = MOMENTUM * self.velocity + own
        total = self.residue + sum(others, self.velocity) / count
        if not encodes:
            return total
        places = total.abs().topk(max(1, -int(-RATIO * len(own) // 1))).indices
        sent = torch.zeros_like(own).index_copy_(0, places, total[places])
        self.residue = total - sent
        self.velocity[places] = 0
        return sent


def reference(layout: dict[str, list[int]], encodes: bool, pieces: int) -> torch.Tensor:
    """Minus what is applied. ``pieces`` of a tensor; piece i is summed by host i modulo their number."""
    hosts, length = list(layout.values()), NUMEL // pieces
    sending = {(host, piece): Owed(length) for host in range(len(hosts)) for piece in range(pieces)}
    owning = {piece: Owner(length) for piece in range(pieces)}
    ranks = sum(len(of_host) for of_host in hosts)
    weights = torch.zeros(NUMEL)
    for step in range(STEPS):
        of_host = [sum(gradient(rank, step) for rank in of_host).split(length) for of_host in hosts]
        for piece in range(pieces):
            owner = owner_of(piece, hosts, encodes)
            others = [sending[h, piece].sent(of_host[h][piece]) for h in range(len(hosts)) if h != owner]
            applied = owning[piece].applied(of_host[owner][piece], others, ranks, encodes)
            weights[piece * length : (piece + 1) * length] -= applied
    return weights


def owner_of(piece: int, hosts: list[list[int]], encodes: bool) -> int:
    """Of ddp, each part of a host in turn has a piece a host; of zero, a piece is a rank's shard."""
    if encodes:
        return piece % len(hosts)
    return next(number for number, ranks in enumerate(hosts) if piece in ranks)


CASES = {
    f"{mode}-{layout}": (mode, layout)
    for mode in ("ddp", "zero1", "zero2", "hsdp")
    for layout in LAYOUTS
    if "+" in layout
}
del CASES["hsdp-3+1"], CASES["zero1-3+1"]


@pytest.mark.parametrize(("mode", "layout"), sampled(CASES, ["ddp-2+2", "zero2-1+1", "ddp-3+1"]))
def test_what_is_applied_is_what_the_formulas_give(ranks: RankPool, tmp_path: Path, mode: str, layout: str) -> None:
    hosts = LAYOUTS[layout]
    sync = {"momentum_correction": MOMENTUM}
    got = ranks.run(train, layout=hosts, args=(mode, sync, list(range(STEPS)), str(tmp_path)))
    encodes = mode in ("ddp", "hsdp")
    width = min(len(of_host) for of_host in hosts.values())
    expected = reference(hosts, encodes, width * len(hosts) if encodes else len(got))
    assert all(torch.equal(other, got[0]) for other in got[1:])
    torch.testing.assert_close(got[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ddp-2+2", "zero2-1+1"),
        ("zero2-1+1", "ddp-2"),
        pytest.param("ddp-2", "zero1-2", marks=pytest.mark.sweep),
        pytest.param("hsdp-2+2", "ddp-3+1", marks=pytest.mark.sweep),
        pytest.param("zero2-3+1", "hsdp-2+2", marks=pytest.mark.sweep),
    ],
)
def test_exact_with_momentum_is_sgd_with_momentum_also_on_other_ranks(
    ranks: RankPool, tmp_path: Path, before: str, after: str
) -> None:
    """While all is sent, momentum before or after the sum is the same; velocities go over to other ranks."""
    weight = torch.zeros(NUMEL, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=MOMENTUM)
    sync, got = {"momentum_correction": MOMENTUM, "warmup_steps": 100}, []
    for each in (before, after):
        mode, _, layout = each.partition("-")
        got = ranks.run(train, layout=LAYOUTS[layout], args=(mode, sync, list(range(STEPS)), str(tmp_path)))
        for step in range(STEPS):
            weight.grad = torch.stack([gradient(rank, step) for rank in range(len(got))]).mean(0)
            optimizer.step()
    torch.testing.assert_close(got[0], weight.detach(), rtol=1e-4, atol=1e-4)


def warned(context: RankContext, momentum: float) -> list[str]:
    strategy = strategy_of(sync={"codec": "topk", "momentum_correction": MOMENTUM})
    trainer = trainer_on_pool(context, strategy, max_epochs=1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.fit(Vector(momentum), loader_of([gradient(context.rank, 0)]))
    return [str(warning.message) for warning in seen if "both take momentum" in str(warning.message)]


@pytest.mark.parametrize(("momentum", "times"), [(0.9, 1), (0.0, 0)])
def test_momentum_that_is_taken_twice_is_warned_of(ranks: RankPool, momentum: float, times: int) -> None:
    first, _ = ranks.run(warned, layout=LAYOUTS["1+1"], args=(momentum,))
    assert len(first) == times
