"""Sparse gradients over any placement of ranks, against sums that are known exactly, and against dense training."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_dist import build
from lightning_dist.config import SyncConfig, from_mapping
from tests.distributed.lightning_runs import loader_of, strategy_of, trainer_on_pool
from tests.distributed.runs import opened
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

Layout = dict[str, list[int]]
LAYOUTS: dict[str, Layout] = {
    "1": {"a": [0]},
    "3": {"a": [0, 1, 2]},
    "1+1": {"a": [0], "b": [1]},
    "cyclic": {"a": [0, 2], "b": [1, 3]},
    "3+1": {"a": [0, 1, 2], "b": [3]},
    "uneven switches": {"a": [0, 1], "b": [2], "c": [3, 4, 5]},
}
SWITCHES = {"uneven switches": {"x": ["a", "c"], "y": ["b"]}}
NUM_ROWS, WIDTH = 50, 3
DTYPES = ("float32", "float64", "bfloat16", "float16")
STEPS = 3


class Tables(nn.Module):
    """One table of each type."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {f"of_{name}": nn.Embedding(NUM_ROWS, WIDTH, sparse=True, dtype=getattr(torch, name)) for name in DTYPES}
        )


def gradient_of(rank: int, step: int, dtype: str) -> torch.Tensor:
    """Rows of its own, some of them twice, with small multiples of 12, so that any mean is exact; rank 1 has none at
    times.
    """
    ids = torch.arange(0 if rank == 1 and step == 1 else 7 + rank) * (rank + 2 + step) % 17
    values = ((ids[:, None] + torch.arange(WIDTH) + rank) % 5 * 12).to(getattr(torch, dtype))
    return torch.sparse_coo_tensor(ids[None], values, (NUM_ROWS, WIDTH), check_invariants=True)


def average(context: RankContext, sync: dict[str, Any], topology: dict[str, Any]) -> list[torch.Tensor]:
    """The means of some steps, several tables at a time; and the lines that were said."""
    module, said = Tables(), list[str]()
    config = from_mapping("sync", sync, SyncConfig)
    means = []
    with opened(context, sync, topology) as (run, all_reduce):
        sparse = build.open_sparse_average(run, module, all_reduce, sync=config, announce=said.append)
        assert sparse is not None
        try:
            for step in range(STEPS):
                futures = [
                    sparse.start(gradient_of(context.rank, step, name), module.tables[f"of_{name}"].weight)
                    for name in DTYPES
                ]
                means += [future.wait() for future in futures]
        finally:
            sparse.close()
    if said:
        assert "tables.of_float32.weight (50 x 3)" in said[0]
    return [*means, torch.tensor(len(said))]


def check_means(results: list[list[torch.Tensor]]) -> None:
    world_size = len(results)
    for *means, said in results:
        assert int(said) == len(DTYPES), "once a table"
        expected = [
            [gradient_of(rank, step, name) for rank in range(world_size)] for step in range(STEPS) for name in DTYPES
        ]
        for got, terms in zip(means, expected, strict=True):
            assert got.is_coalesced()
            rows = sorted({row for term in terms for row in term._indices()[0].tolist()})
            assert got.indices()[0].tolist() == rows, "rows that some rank had, and no others"
            mean = torch.stack([term.to_dense().double() for term in terms]).mean(0)
            torch.testing.assert_close(got.to_dense().double(), mean, rtol=TOLERANCES[got.dtype], atol=0)
            first = results[0][: len(means)]
        assert all(torch.equal(a.values(), b.values()) for a, b in zip(means, first, strict=True)), "alike to the bit"


# One rounding of the sum in a host, one between hosts, one of the mean; float32 and float64 sum these exactly.
TOLERANCES = {torch.float32: 2**-22, torch.float64: 2**-51, torch.bfloat16: 3 * 2**-8, torch.float16: 3 * 2**-10}


@pytest.mark.parametrize("name", LAYOUTS)
def test_means_for_any_placement(ranks: RankPool, name: str) -> None:
    topology = {"switches": SWITCHES[name]} if name in SWITCHES else {}
    sync = {"sparse": {"dense_above": 1}}
    check_means(ranks.run(average, layout=LAYOUTS[name], args=(sync, topology)))


@pytest.mark.parametrize(
    "sync",
    [
        {"algorithm": "flat", "sparse": {"dense_above": 1}},
        {"sparse": {"dense_above": 0}},
        {"sparse": {"dense_above": 0.2}},
        {"codec": "int8"},
    ],
    ids=["flat", "whole", "rows, then whole", "exact beside a codec"],
)
def test_other_ways(ranks: RankPool, sync: dict[str, Any]) -> None:
    check_means(ranks.run(average, layout=LAYOUTS["3+1"], args=(sync, {})))


TABLE_ROWS = 30
FITS = {"a": [0, 1], "b": [2]}


class Words(pl.LightningModule):
    """Tables that are used in different ways: on all ranks, on some, with no ids, with the same id twice, in a bag.

    Args:
        optimizer: Name in torch.optim.
        sparse: Whether gradients are sparse; the reference for what does not care has dense ones.
    """

    def __init__(self, optimizer: str, *, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.optimizer = optimizer
        self.left = nn.Embedding(TABLE_ROWS, 5, sparse=sparse)
        self.right = nn.Embedding(TABLE_ROWS, 5, sparse=sparse)
        self.bag = nn.EmbeddingBag(TABLE_ROWS, 5, sparse=sparse, mode="sum")
        self.often_empty = nn.Embedding(TABLE_ROWS, 5, sparse=sparse)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        left, right = batch
        product = (self.left(left) * (self.right(right) + self.bag(left.view(-1, 2).repeat(2, 1)))).sum(1)
        return torch.tanh(product).mean() + self.often_empty(left[left % 7 == 3]).square().sum()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self)


def make_optimizer(module: Words) -> torch.optim.Optimizer:
    return getattr(torch.optim, module.optimizer)(list(module.parameters()), lr=0.05)  # type: ignore[no-any-return]


def ids_of(rank: int, index: int) -> torch.Tensor:
    """[2, 8]: ids of two tables, of which the last rows are never used."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    return torch.randint(TABLE_ROWS - 8, (2, 8), generator=generator)


def fit(
    context: RankContext, optimizer: str, sync: dict[str, Any], accumulation: int, clip: dict[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    module = Words(optimizer)
    loader = loader_of([ids_of(context.rank, index) for index in range(6)])
    arguments = {"accumulate_grad_batches": accumulation, **(clip or {})}
    trainer_on_pool(context, strategy_of(sync=sync), **arguments).fit(module, loader)
    return module.state_dict()


def fit_alone(
    optimizer: str, world_size: int, accumulation: int, clip: dict[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """The same in one process: the mean over ranks and micro-batches."""
    module = Words(optimizer, sparse=optimizer == "SparseAdam")
    optimizing = make_optimizer(module)
    for first in range(0, 6, accumulation):
        optimizing.zero_grad()
        batches = [ids_of(rank, first + i) for rank in range(world_size) for i in range(accumulation)]
        (torch.stack([module.loss(batch) for batch in batches]).sum() / len(batches)).backward()
        if clip is not None and "gradient_clip_algorithm" in clip:
            nn.utils.clip_grad_value_(module.parameters(), clip["gradient_clip_val"])
        elif clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip["gradient_clip_val"])
        optimizing.step()
    return module.state_dict()


@pytest.mark.parametrize(
    ("optimizer", "sparse", "accumulation"),
    [
        ("SGD", {"dense_above": 1}, 2),
        ("Adagrad", {"dense_above": 1}, 1),
        ("SparseAdam", {"dense_above": 1}, 1),
        ("SparseAdam", {"dense_above": 0.5}, 2),
        ("SGD", {"exchange": "parameter_server"}, 1),
        ("Adagrad", {"exchange": "parameter_server"}, 2),
        ("SparseAdam", {"exchange": "parameter_server"}, 1),
    ],
    ids=str,
)
def test_training_equals_the_reference(
    ranks: RankPool, optimizer: str, sparse: dict[str, Any], accumulation: int
) -> None:
    sync = {"sparse": sparse}
    results = ranks.run(fit, layout=FITS, args=(optimizer, sync, accumulation))
    expected = fit_alone(optimizer, len(results), accumulation)
    fresh = Words(optimizer).state_dict()
    for got in results:
        for name, value in expected.items():
            # A few roundings of values near 1; the root of Adagrad and Adam makes small gradients' roundings larger.
            torch.testing.assert_close(got[name], value, rtol=0, atol=1e-5)
            assert torch.equal(got[name], results[0][name])
            assert torch.equal(got[name][-8:], fresh[name][-8:]), "rows that are never used stay"
            assert not torch.equal(got[name], fresh[name])


SERVED = {"sparse": {"exchange": "parameter_server"}}
IN_PROCESSES = {**SERVED, "parameter_server": {"servers": "processes"}}
BY_NORM = {"gradient_clip_val": 0.05}
BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize(
    ("sync", "clip"),
    [
        pytest.param({"sparse": {"exchange": "rows"}}, BY_NORM, id="rows-norm"),
        pytest.param(SERVED, BY_NORM, id="served-norm"),
        pytest.param(SERVED, BY_VALUE, id="served-value"),
        pytest.param(IN_PROCESSES, BY_NORM, id="processes-norm", marks=pytest.mark.sweep),
    ],
)
def test_clipping_is_that_of_the_dense_gradient(ranks: RankPool, sync: dict[str, Any], clip: dict[str, Any]) -> None:
    results = ranks.run(fit, layout=FITS, args=("SGD", sync, 1, clip))
    expected, unclipped = fit_alone("SGD", len(results), 1, clip), fit_alone("SGD", len(results), 1)
    for got in results:
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=0, atol=1e-6)
            assert not torch.allclose(got[name], unclipped[name], rtol=0, atol=1e-5), "it is clipped at all"
