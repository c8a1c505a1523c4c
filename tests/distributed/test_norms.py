"""Norms of gradients that are spread over ranks are those of the whole gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from lightning_dist import build
from lightning_dist.config import ParallelConfig, SyncConfig, TensorConfig
from lightning_dist.parallel.norms import GlobalNorm
from tests.distributed.test_scattered import open_run
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext


def norms_of(context: RankContext, per_rank: list[list[float]], whole: list[float]) -> list[float]:
    """Norms 2, 1, 3 and inf of a gradient of which each rank holds a part, beside one that is whole; after clipping."""
    run = open_run(context)
    config = ParallelConfig(mode="zero2")
    links = build.open_shard_links(run, config, SyncConfig(timeout_s=20.0))
    rows = len(per_rank[0])
    model = nn.Module()
    model.spread = nn.Parameter(torch.zeros(rows * context.world_size))
    model.whole = nn.Parameter(torch.tensor(0.0))
    sharded = build.shard_model(model, links, run=run, parallel=config, by_child=False)
    try:
        model.spread.grad = model.spread.detach().clone()
        model.spread.grad._local_tensor.copy_(torch.tensor(per_rank[context.rank]))
        model.whole.grad = torch.tensor(whole[0])
        norm = GlobalNorm(run.collectives, links.shards)
        listed = [model.spread, model.whole]
        found = [float(norm.total(listed, p)) for p in (2.0, 1.0, 3.0, math.inf)]
        before = float(norm.clip(listed, 1.0))
        found += [before, float(norm.total(listed))]
        model.spread.grad._local_tensor.fill_(math.nan if context.rank == 1 else 1.0)
        with pytest.raises(RuntimeError, match="total norm of gradients is nan"):
            norm.clip(listed, 1.0, error_if_nonfinite=True)
        sharded.release(whole=True)
        assert type(model.spread) is nn.Parameter
        assert float(norm.total([])) == 0.0
        return found
    finally:
        links.close()
        run.close()


def test_shard_norms_3_and_4_give_5(ranks: RankPool) -> None:
    for found in ranks.run(norms_of, world_size=2, args=([[3.0, 0.0], [0.0, -4.0]], [0.0])):
        assert found[:4] == pytest.approx([5.0, 7.0, (27 + 64) ** (1 / 3), 4.0])
        assert found[4:] == pytest.approx([5.0, 1.0], abs=1e-5)


def test_what_is_whole_counts_once(ranks: RankPool) -> None:
    for found in ranks.run(norms_of, world_size=2, args=([[3.0], [4.0]], [12.0])):
        assert found[:4] == pytest.approx([13.0, 19.0, (27 + 64 + 1728) ** (1 / 3), 12.0])


def norm_in_double(context: RankContext) -> tuple[torch.dtype, float]:
    """Of gradients spread over stages; this rank counts its own."""
    run = open_run(context)
    try:
        weights = [nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(context.world_size)]
        for weight in weights:
            weight.grad = torch.full((1,), 1 / 3, dtype=torch.float64)
        own = weights[context.rank]
        norm = GlobalNorm(run.collectives, stages=run.world, counts=lambda weight: weight is own)
        found = norm.total(weights)
        return found.dtype, float(found)
    finally:
        run.close()


def test_the_norm_of_double_gradients_is_double(ranks: RankPool) -> None:
    for dtype, found in ranks.run(norm_in_double, world_size=2):
        assert dtype == torch.float64
        assert found == pytest.approx(math.sqrt(2) / 3, rel=1e-15)


def norms_of_parts(context: RankContext, per_rank: list[float], whole: float) -> list[float]:
    """Of gradients that ranks which share layers hold parts of: split, sharded and split, sharded only, whole."""
    run = open_run(context)
    config = ParallelConfig(mode="zero2", tensor=TensorConfig(size=2))
    tensor = build.open_tensor_links(run, config, SyncConfig(timeout_s=20.0))
    norm = GlobalNorm(run.collectives, tensor.placed.group("dp_shard"), tensor.tensor)
    meshes = tensor.placed.mesh
    try:
        own = torch.tensor([per_rank[context.rank]])
        both = nn.Parameter(DTensor.from_local(torch.zeros(1), meshes, [Shard(0), Shard(0)]))
        both.grad = DTensor.from_local(own.clone(), meshes, [Shard(0), Shard(0)])
        only_split = nn.Parameter(DTensor.from_local(torch.zeros(1), tensor.mesh, [Shard(0)]))
        only_split.grad = DTensor.from_local(
            torch.tensor([5.0, 2.0])[tensor.tensor.index].view(1), tensor.mesh, [Shard(0)]
        )
        beside = nn.Parameter(torch.zeros(1))
        beside.grad = torch.tensor([whole])
        listed = [both, only_split, beside]
        found = [float(norm.total([both])), *(float(norm.total(listed, p)) for p in (2.0, 1.0, math.inf))]
        norm.clip(listed, 1.0)
        found.append(float(norm.total(listed)))
        if context.rank == 1:
            both.grad._local_tensor.fill_(math.nan)
        with pytest.raises(RuntimeError, match="total norm of gradients is nan"):
            norm.clip(listed, 1.0, error_if_nonfinite=True)
        return found
    finally:
        tensor.close()
        run.close()


def test_parts_of_layers_with_norms_3_and_4_give_5(ranks: RankPool) -> None:
    for found in ranks.run(norms_of_parts, world_size=4, args=([3.0, 4.0, 0.0, 0.0], 4.0)):
        assert found[0] == pytest.approx(5.0)
        assert found[1:4] == pytest.approx([math.sqrt(25 + 29 + 16), 7 + 7 + 4, 5.0])
        assert found[4] == pytest.approx(1.0, abs=1e-5)
