"""Sparse embeddings in sharded models: trained as dense ones are in one process, and saved as whole tables."""

from __future__ import annotations

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
    "2+1": {"a": [0, 1], "b": [2]},
    "1+1": {"a": [0], "b": [1]},
    "1": {"a": [0]},
}
MODES = ("ddp", "zero1", "zero2", "zero3", "hsdp")
ROWS, WIDTH, STEPS = 31, 5, 4
SERVED = {"exchange": "parameter_server"}
IN_PROCESSES = {"sparse": SERVED, "parameter_server": {"servers": "processes"}}


class Net(nn.Module):
    """Two tables and a bag beside layers of odd sizes; ``odd`` is used for odd ids only."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.odd = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, sparse=sparse, mode="sum")
        self.head = nn.Sequential(nn.Linear(WIDTH, 13), nn.Tanh(), nn.Linear(13, 3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        words = self.words(ids) + self.bag(ids.view(-1, 2).repeat(2, 1))
        return self.head(words).square().mean() + self.odd(ids[ids % 2 == 1]).square().sum()


class Mixed(pl.LightningModule):
    """Trains :class:`Net`: with one optimizer, or by hand with one for tables and one for the rest.

    Args:
        optimizer: Name in torch.optim; ``SparseAdam`` is for tables, and then SGD for the rest.
        sparse: Whether gradients are sparse.
    """

    def __init__(self, optimizer: str, *, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net(sparse=sparse)
        self.optimizer = optimizer
        self.automatic_optimization = optimizer != "SparseAdam"
        self.norms: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch)
        if not self.automatic_optimization:
            for each in self.optimizers():
                each.zero_grad()
            self.manual_backward(loss)
            for each in self.optimizers():
                each.step()
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.automatic_optimization:
            self.norms.append(float(self.trainer.strategy.gradient_norm(2.0)))  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        made = optimizers_of(self)
        return made if len(made) > 1 else made[0]


def optimizers_of(module: Mixed) -> list[torch.optim.Optimizer]:
    if module.automatic_optimization:
        return [getattr(torch.optim, module.optimizer)(module.parameters(), lr=0.05)]
    head = list(module.net.head.parameters())
    tables = [*module.net.words.parameters(), *module.net.odd.parameters(), *module.net.bag.parameters()]
    return [torch.optim.SparseAdam(tables, lr=0.05), torch.optim.SGD(head, lr=0.05)]


def ids_of(rank: int, index: int) -> torch.Tensor:
    """[8] of rows, the last of which are never used; rank 1 has no odd ones at first."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    ids = torch.randint(ROWS - 8, (8,), generator=generator)
    return ids // 2 * 2 if rank == 1 and index == 0 else ids


def fit(
    context: RankContext, parallel: str, optimizer: str, sync: dict[str, Any], trainer: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], list[float]]:
    module = Mixed(optimizer)
    per = trainer.get("accumulate_grad_batches", 1)
    batches = [ids_of(context.rank, index) for index in range(STEPS * per)]
    trainer_on_pool(context, strategy_of(parallel=parallel, sync=sync), **trainer).fit(module, loader_of(batches))
    return module.state_dict(), module.norms


def fit_alone(optimizer: str, world_size: int, trainer: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same in one process, with dense gradients where the optimizer takes them."""
    module, per = Mixed(optimizer, sparse=optimizer == "SparseAdam"), trainer.get("accumulate_grad_batches", 1)
    optimizing, norms = optimizers_of(module), []
    for first in range(0, STEPS * per, per):
        module.zero_grad()
        batches = [ids_of(rank, first + i) for rank in range(world_size) for i in range(per)]
        (torch.stack([module.net(batch) for batch in batches]).sum() / len(batches)).backward()
        if optimizer != "SparseAdam":
            norms.append(float(nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])))
        if "gradient_clip_val" in trainer:
            nn.utils.clip_grad_norm_(module.parameters(), trainer["gradient_clip_val"])
        for each in optimizing:
            each.step()
    return module.state_dict(), norms


ACCUMULATED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
CASES = {
    f"{parallel}-{layout}-{name}": (parallel, layout, *case)
    for parallel in MODES
    for layout in ("2+2", "2+1")
    if (parallel, layout) != ("hsdp", "2+1")
    for name, case in {
        "SGD": ("SGD", {}, {}),
        "SGD clipped": ("SGD", {}, ACCUMULATED),
        "Adagrad": ("Adagrad", {}, {}),
        "SparseAdam": ("SparseAdam", {}, {}),
        "whole": ("SGD", {"sparse": {"dense_above": 0}}, {}),
        "served": ("Adagrad", {"sparse": SERVED}, {}),
        "served clipped": ("SGD", {"sparse": SERVED}, ACCUMULATED),
        "served SparseAdam": ("SparseAdam", {"sparse": SERVED}, {}),
        "processes clipped": ("SGD", IN_PROCESSES, ACCUMULATED),
        "processes SparseAdam": ("SparseAdam", IN_PROCESSES, {}),
        "auto": ("SGD", {"sparse": {"exchange": "auto", "server_above_bytes": 100}}, ACCUMULATED),
    }.items()
}


@pytest.mark.parametrize(
    ("parallel", "layout", "optimizer", "sync", "trainer"),
    sampled(CASES, ["zero2-2+1-SGD clipped", "zero2-2+2-SparseAdam", "zero2-2+1-served clipped"]),
)
def test_training_equals_the_reference(
    ranks: RankPool, parallel: str, layout: str, optimizer: str, sync: dict[str, Any], trainer: dict[str, Any]
) -> None:
    results = ranks.run(fit, layout=LAYOUTS[layout], args=(parallel, optimizer, sync, trainer))
    expected, norms = fit_alone(optimizer, len(results), trainer)
    fresh = Mixed(optimizer).state_dict()
    for got, of_rank in results:
        for name, value in expected.items():
            # A few roundings of values near 1; the roots of Adagrad and Adam make those of small gradients larger.
            torch.testing.assert_close(got[name], value, rtol=0, atol=1e-6 if optimizer == "SGD" else 1e-5)
            assert torch.equal(got[name], results[0][0][name])
            assert not torch.equal(got[name], fresh[name])
        assert torch.equal(got["net.words.weight"][-8:], fresh["net.words.weight"][-8:]), "never used"
        torch.testing.assert_close(of_rank, norms, rtol=1e-5, atol=1e-6)


def save_or_go_on(
    context: RankContext, parallel: str, sparse: dict[str, Any], kind: str, folder: str, resumes: bool
) -> dict[str, torch.Tensor]:
    """An epoch, or two of which the second begins from the first one's checkpoint."""
    path = Path(folder) / "half.ckpt"
    module = Mixed("Adagrad")
    trainer = trainer_on_pool(
        context,
        strategy_of(parallel=parallel, sync={"sparse": sparse}, checkpoint=kind),
        max_epochs=2 if resumes else 1,
        callbacks=[] if resumes else [SaveAtEnd(path)],
    )
    batches = [ids_of(0, index) for index in range(STEPS)]  # alike: any number will do
    trainer.fit(module, loader_of(batches), ckpt_path=path if resumes else None)
    return module.state_dict()


PAIRS = {
    f"{kind}: {before}, {after}": (kind, before, after)
    for kind in ("sharded", "full")
    for before in ("ddp 2+2 rows", "zero2 2+1 rows", "zero1 2+2 served", "zero3 1+1 rows", "hsdp 2+2 served")
    for after in ("ddp 1 rows", "zero2 2+2 served", "zero2 1+1 rows", "ddp 2+1 served", "hsdp 2+2 rows")
}


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    sampled(
        PAIRS,
        [
            "sharded: ddp 2+2 rows, zero2 2+2 served",
            "full: zero1 2+2 served, zero2 1+1 rows",
        ],
    ),
)
def test_checkpoints_go_on_elsewhere(ranks: RankPool, tmp_path: Path, kind: str, before: str, after: str) -> None:
    got: list[Any] = []
    for resumes, each in enumerate((before, after)):
        parallel, layout, exchange = each.split()
        sparse = SERVED if exchange == "served" else {}
        args = (parallel, sparse, kind, str(tmp_path), bool(resumes))
        got = ranks.run(save_or_go_on, layout=LAYOUTS[layout], args=args)
    module = Mixed("Adagrad", sparse=False)
    (optimizing,) = optimizers_of(module)
    for step in range(2 * STEPS):
        module.zero_grad()
        module.net(ids_of(0, step % STEPS)).backward()
        optimizing.step()
    for weights in got:
        for name, value in module.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)
