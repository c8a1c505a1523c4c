"""Which random numbers a split model draws: alike where activations are whole, each rank's own where they are split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812  # the name everybody uses
from torch.utils.checkpoint import checkpoint

from lightning_dist.parallel.tensor import parallelize
from tests.distributed.split_models import loss_of, make_batches, make_gpt, placed_mesh, whole_gradients
from tests.support.ranks import RankPool
from tests.support.reference import assert_same
from tests.support.tasks import RankContext


class Noisy(nn.Module):
    """Dropout on whole activations, on split ones, and on whole ones again; keeps the masks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)
        self.masks: list[Tensor] = []

    def dropped(self, x: Tensor) -> Tensor:
        y = F.dropout(x, 0.5)
        self.masks.append(y.detach() == 0)
        return y

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropped(self.norm(x))
        return x + self.dropped(self.down(self.dropped(self.up(x))))


def drop(context: RankContext, is_seeded: bool) -> list[Tensor]:
    torch.manual_seed(5 if is_seeded else context.rank)
    model = nn.Sequential(Noisy(), Noisy())
    with placed_mesh(context, {"tp": 2}) as placed:
        parallel = parallelize(model, placed.mesh, plan={"*.up": "column", "*.down": "row"})
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            with parallel.running():
                x = model(x)
    return [mask for layer in model for mask in layer.masks]


@pytest.mark.parametrize("is_seeded", [True, False], ids=["seeded", "not_seeded"])
def test_masks_are_alike_on_whole_activations_and_each_ranks_own_on_split_ones(
    ranks: RankPool, is_seeded: bool
) -> None:
    first, second = ranks.run(drop, world_size=2, args=(is_seeded,))
    assert len(first) == 12
    for index, (mine, theirs) in enumerate(zip(first, second, strict=True)):
        assert 0.3 < mine.float().mean() < 0.7
        if index % 3 == 1:
            assert mine.shape == (8, 32)
            assert 0.3 < (mine != theirs).float().mean() < 0.7, "split: each rank draws its own"
        else:
            assert mine.shape == (8, 16)
            assert torch.equal(mine, theirs), "whole: alike"


class OnlySplit(Noisy):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropped(self.up(self.norm(x))))


def drop_on_split_only(context: RankContext) -> list[Tensor]:
    model = nn.Sequential(OnlySplit(), OnlySplit())
    with placed_mesh(context, {"tp": 2}) as placed:
        parallelize(model, placed.mesh, plan={"*.up": "column", "*.down": "row"})
        for _ in range(2):
            model(torch.randn(8, 16, generator=torch.Generator().manual_seed(0)))
    return [mask for layer in model for mask in layer.masks]


def test_no_two_layers_and_no_two_steps_draw_the_same_masks(ranks: RankPool) -> None:
    first, second = ranks.run(drop_on_split_only, world_size=2)
    drawn = [*first, *second]
    assert len(drawn) == 8
    assert not any(torch.equal(drawn[i], drawn[j]) for i in range(8) for j in range(i))


def drop_under_recomputation(context: RankContext, how: str) -> dict[str, Any]:
    model = make_gpt(dropout=0.3)
    batch = make_batches("gpt", 1)[0]
    with placed_mesh(context, {"tp": 2}) as placed:
        parallel = parallelize(model, placed.mesh)
        torch.manual_seed(7)
        if how != "plain":
            for block in model.blocks:
                recompute(block if how == "blocks" else block.attention)
        for _ in range(2):  # the second pass starts where the first left the generators
            with parallel.running():
                loss = loss_of(model, batch)
            with parallel.running():
                loss.backward()
        gradients = whole_gradients(parallel, model)
        whole_parameters = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
        return {"gradients": gradients, "state": torch.get_rng_state(), "whole": whole_parameters}


def recompute(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda x: checkpoint(forward, x, use_reentrant=False)  # type: ignore[method-assign]


def test_recomputation_draws_the_same_masks(ranks: RankPool) -> None:
    plain = ranks.run(drop_under_recomputation, world_size=2, args=("plain",))
    for how in ("blocks", "attention"):
        for expected, result in zip(plain, ranks.run(drop_under_recomputation, world_size=2, args=(how,)), strict=True):
            assert_same(result["gradients"], expected["gradients"], atol=0)
            assert torch.equal(result["state"], expected["state"])
    first, second = plain
    assert torch.equal(first["state"], second["state"]), "the generators of a group stay alike"
    assert first["whole"]
    for name in first["whole"]:
        assert torch.equal(first["gradients"][name], second["gradients"][name]), name


class EndsInside(Noisy):
    """What is recomputed begins before a column layer and ends before its row layer."""

    def __init__(self) -> None:
        super().__init__()
        self.is_recomputed = False

    def inside(self, x: Tensor) -> Tensor:
        return self.dropped(torch.tanh(self.up(self.dropped(x))))

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.inside, x, use_reentrant=False) if self.is_recomputed else self.inside(x)
        return x + self.dropped(self.down(y))


def recompute_inside(context: RankContext) -> tuple[list[Tensor], list[Tensor]]:
    model = nn.Sequential(EndsInside(), EndsInside())
    with placed_mesh(context, {"tp": 2}) as placed:
        parallel = parallelize(model, placed.mesh, plan={"*.up": "column", "*.down": "row"})
        gradients = []
        for is_recomputed in (False, True):
            torch.manual_seed(9)
            for layer in model:
                layer.is_recomputed = is_recomputed
            model.zero_grad()
            for _ in range(2):
                with parallel.running():
                    loss = model(torch.randn(8, 16, generator=torch.Generator().manual_seed(0))).square().sum()
                with parallel.running():
                    loss.backward()
            gradients.append([layer.up.weight.grad.to_local().clone() for layer in model])
        return gradients[0], gradients[1]


def test_what_is_recomputed_may_end_where_activations_are_split(ranks: RankPool) -> None:
    for plain, recomputed in ranks.run(recompute_inside, world_size=2):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(plain, recomputed, strict=True))


def draws_without_dropout(context: RankContext) -> Tensor:
    model = make_gpt()
    with placed_mesh(context, {"tp": 2}) as placed:
        parallelize(model, placed.mesh)
        torch.manual_seed(3)
        model(make_batches("gpt", 1)[0][0])
        return torch.rand(4)


def test_a_model_without_dropout_draws_nothing(ranks: RankPool) -> None:
    expected = torch.rand(4, generator=torch.Generator().manual_seed(3))
    for drawn in ranks.run(draws_without_dropout, world_size=2):
        assert torch.equal(drawn, expected)
