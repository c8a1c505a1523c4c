"""Optimizers and hooks of split layers: whose state is of other shapes, who is refused, and norms for loggers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the name everybody uses

from tests.distributed.lightning_runs import loader_of, strategy_of, trainer_on_pool
from tests.distributed.sharded_runs import KeepState, RowsAndColumns
from tests.distributed.split_models import spread
from tests.distributed.test_sharded_training import SaveAtEnd
from tests.support.ranks import RankPool
from tests.support.reference import assert_same
from tests.support.tasks import RankContext

STEPS = 4
PLAN = {"*.fused": "fused_column:2", "*.down": "row", "*.tokens": "embedding"}
SPLIT: dict[str, Any] = {"mode": "tensor", "tensor": {"plan": PLAN}}


class Gated(nn.Module):
    """Two projections fused in one, the row layer after them, and an embedding; sizes that differ in every dim."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 7)
        self.fused = nn.Linear(7, 16)
        self.down = nn.Linear(8, 7)
        self.norm = nn.LayerNorm(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(x[:, 0].abs().long().clamp_max(5))
        gate, up = self.fused(x).chunk(2, -1)
        return self.norm(x + self.down(torch.tanh(gate) * up))


class Penalised(Gated):
    """Uses the embedding's weight beside calling it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + F.linear(super().forward(x), self.tokens.weight).sum()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 7, generator=generator), torch.randn(4, 7, generator=generator)) for _ in range(STEPS)]


def loss_of(net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(net(batch[0]), batch[1])


class Learner(pl.LightningModule):
    """Trains a net by an optimizer of the given class."""

    def __init__(self, optimizer: type[torch.optim.Optimizer], net: type[nn.Module] = Gated) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = spread(net())
        self._optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer(list(self.net.parameters()), lr=0.05)  # type: ignore[call-arg]


class Rows(RowsAndColumns):
    """With the argument that all others have."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters)


def fit(context: RankContext, module: pl.LightningModule, *callbacks: pl.Callback, **arguments: Any) -> None:
    ckpt_path = arguments.pop("ckpt_path", None)
    trainer = trainer_on_pool(
        context,
        strategy_of(parallel=arguments.pop("parallel", SPLIT)),
        callbacks=list(callbacks),
        limit_val_batches=0,
        **arguments,
    )
    trainer.fit(module, loader_of(batches()), ckpt_path=ckpt_path)


def train_rows(context: RankContext, folder: str) -> dict[str, Any]:
    """Straight on, and by a checkpoint at half of the way."""
    straight, half, resumed, keep = Learner(Rows), Learner(Rows), Learner(Rows), KeepState()
    path = str(Path(folder) / "half.ckpt")
    fit(context, straight, keep, max_epochs=2)
    fit(context, half, SaveAtEnd(path))
    fit(context, resumed, ckpt_path=path, max_epochs=2)
    return {"straight": straight.net.state_dict(), "resumed": resumed.net.state_dict(), "states": keep.states}


def test_state_of_other_shapes_than_the_parameters_is_saved_whole_and_loaded(ranks: RankPool, tmp_path: Path) -> None:
    module = Learner(Rows)
    optimizer = module.configure_optimizers()
    for batch in [*batches(), *batches()]:
        optimizer.zero_grad()
        loss_of(module.net, batch).backward()
        optimizer.step()
    results = ranks.run(train_rows, world_size=2, args=(str(tmp_path),))
    for result in results:
        assert_same(result["straight"], dict(module.net.state_dict()), atol=1e-6)
        # Running means of rows are a sum over ranks, each of which keeps its part; a checkpoint has the rounded sums.
        assert_same(result["resumed"], result["straight"], atol=1e-7)
    for index, entries in optimizer.state_dict()["state"].items():
        assert_same(results[0]["states"][index], entries, atol=1e-5)


class Norms(pl.Callback):
    """What hooks see of the gradients."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        norms = grad_norm(pl_module, 2)
        total = trainer.strategy.gradient_norm()
        assert {type(value) for value in norms.values()} <= {float, torch.Tensor}
        self.seen.append({**{name: float(value) for name, value in norms.items()}, "total": float(total)})

    on_after_backward_types: tuple[type, ...] = ()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_after_backward_types = tuple({type(p.grad.abs().max()) for p in pl_module.parameters()})  # type: ignore[union-attr]


def norms_of(context: RankContext) -> list[dict[str, Any]]:
    norms = Norms()
    fit(context, Learner(torch.optim.SGD), norms, limit_train_batches=1)
    assert norms.on_after_backward_types == (torch.Tensor,)
    return norms.seen


def test_norms_that_hooks_compute_are_whole_numbers(ranks: RankPool) -> None:
    module = Learner(torch.optim.SGD)
    loss_of(module.net, batches()[0]).backward()
    expected = {f"grad_2.0_norm/{n}": float(p.grad.norm()) for n, p in module.named_parameters() if p.grad is not None}
    total = float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]))
    for (seen,) in ranks.run(norms_of, world_size=2):
        assert seen["total"] == pytest.approx(total, rel=1e-5)
        assert seen["grad_2.0_norm_total"] == pytest.approx(total, rel=1e-5)
        assert {name: seen[name] for name in expected} == pytest.approx(expected, rel=1e-5)


class Doubling(Learner):
    """Keeps the gradients that its hook sees, and doubles them."""

    def __init__(self) -> None:
        super().__init__(torch.optim.SGD)
        self.seen: list[torch.Tensor] = []

    def train_dataloader(self) -> Any:
        rank = int(self.trainer.distributed_sampler_kwargs["rank"])
        return loader_of([(x + rank, y) for x, y in batches()])

    def on_after_backward(self) -> None:
        gradient = self.net.norm.weight.grad
        assert gradient is not None
        self.seen.append(getattr(gradient, "full_tensor", lambda: gradient)().clone())
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(2.0)


def double(context: RankContext, parallel: dict[str, Any]) -> dict[str, Any]:
    module = Doubling()
    trainer = trainer_on_pool(context, strategy_of(parallel=parallel), max_epochs=1, limit_val_batches=0)
    trainer.fit(module)
    return {"seen": module.seen, "weights": module.net.state_dict()}


@pytest.mark.parametrize(
    "parallel", [SPLIT, {"mode": "zero2", "tensor": {"size": 2, "plan": PLAN}}], ids=["tensor", "zero2"]
)
def test_hooks_after_backward_see_averages_and_may_change_them(ranks: RankPool, parallel: dict[str, Any]) -> None:
    module = Doubling()
    optimizer = torch.optim.SGD(module.net.parameters(), lr=0.05)
    expected = []
    for x, y in batches():
        optimizer.zero_grad()
        ((loss_of(module.net, (x, y)) + loss_of(module.net, (x + 1, y))) / 2).backward()
        expected.append(module.net.norm.weight.grad.clone())
        for parameter in module.net.parameters():
            parameter.grad.mul_(2.0)
        optimizer.step()
    for result in ranks.run(double, layout={"a": [0, 1], "b": [2, 3]}, args=(parallel,)):
        torch.testing.assert_close(torch.stack(result["seen"]), torch.stack(expected), rtol=1e-5, atol=1e-6)
        assert_same(result["weights"], dict(module.net.state_dict()), atol=1e-6)


REFUSED: list[tuple[type[torch.optim.Optimizer], type[nn.Module], dict[str, Any], str]] = [
    (torch.optim.Adafactor, Gated, SPLIT, "CombinationError: Adafactor does not step layers that are split over ranks"),
    (torch.optim.LBFGS, Gated, SPLIT, "CombinationError: LBFGS does not step layers that are split over ranks"),
    (torch.optim.Rprop, Gated, SPLIT, "CombinationError: Rprop does not step layers that are split over ranks"),
    (
        torch.optim.LBFGS,
        Gated,
        {"mode": "zero2", "tensor": {"size": 2, "plan": PLAN}},
        "CombinationError: LBFGS does not step layers",
    ),
    (torch.optim.SGD, Penalised, SPLIT, "CombinationError: a parameter of a split layer was used outside of that"),
    (
        torch.optim.SGD,
        Gated,
        {"mode": "tensor", "tensor": {"size": 3, "plan": PLAN}},
        "PlacementError: parallel.tensor.size=3: 2 ranks",
    ),
]


def refusals(context: RankContext) -> list[str]:
    said = []
    for optimizer, net, parallel, _ in REFUSED:
        try:
            fit(context, Learner(optimizer, net), parallel=parallel)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("")
    return said


def test_what_split_layers_do_not_take_is_refused_by_name(ranks: RankPool) -> None:
    for said in ranks.run(refusals, world_size=2, fresh=True):
        for (optimizer, net, _, expected), text in zip(REFUSED, said, strict=True):
            assert text.startswith(expected), f"{optimizer.__name__}, {net.__name__}: {text}"
