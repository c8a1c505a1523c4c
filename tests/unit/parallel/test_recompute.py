"""Recomputation: the same numbers from less memory, whatever a block does; when, and in which blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dist.config import RecomputeConfig
from lightning_dist.errors import ConfigError
from lightning_dist.parallel.recompute import Recomputation
from tests.unit.parallel.recomputed import (
    BUDGET,
    EVERY_2,
    FULL,
    MODES,
    OUTSIDE_BYTES,
    ROW_BYTES,
    SELECTIVE,
    WIDTH,
    AttentionBlock,
    AttentionDropoutBlock,
    BatchNormBlock,
    Block,
    ConvolutionBlock,
    CountingBlock,
    CumulativeNormBlock,
    DropoutBlock,
    IdentityBlock,
    InPlaceBlock,
    Net,
    SpectralNormBlock,
    ViewBlock,
    check_same,
    kept_bytes,
    make_net,
    recomputing,
    rows,
)

BLOCKS: list[type[Block]] = [
    *(Block, DropoutBlock, AttentionBlock, AttentionDropoutBlock, BatchNormBlock, CumulativeNormBlock),
    *(SpectralNormBlock, CountingBlock, ViewBlock, ConvolutionBlock, InPlaceBlock),
]
each_mode = pytest.mark.parametrize("options", MODES.values(), ids=list(MODES))


# -- the same numbers


@each_mode
@pytest.mark.parametrize("block", BLOCKS)
def test_nothing_differs(block: type[Block], options: RecomputeConfig) -> None:
    model = make_net(block)
    check_same(model, options)
    assert max(model.runs) == 4  # two steps, forward and again in backward


@each_mode
def test_a_block_whose_work_is_for_nothing(options: RecomputeConfig) -> None:
    model = make_net(IdentityBlock)
    check_same(model, options)
    assert model.runs == [2] * 4  # backward never asks for what it kept


def test_selective_explains_what_it_cannot_do() -> None:
    class Changed(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.relu_(self.up(x)))

    check_same(make_net(Changed), FULL)
    model = make_net(Changed)
    with recomputing(model, SELECTIVE):
        loss = model(rows())
        with pytest.raises(RuntimeError, match=r"in place.*use recompute=full"):
            loss.backward()


@each_mode
def test_an_input_that_wants_no_gradient(options: RecomputeConfig) -> None:
    model = make_net(DropoutBlock)
    model.first.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    check_same(model, options)


@each_mode
def test_a_block_called_twice(options: RecomputeConfig) -> None:
    def step(model: Net) -> Tensor:
        x = model.first(rows())
        for block in (*model.blocks, *model.blocks):
            x = block(x)
        return model.last(x).square().mean()

    for block in (DropoutBlock, BatchNormBlock, SpectralNormBlock):
        check_same(make_net(block), options, step)


@each_mode
def test_any_arguments_and_results(options: RecomputeConfig) -> None:
    class Odd(Block):
        def forward(  # type: ignore[override]
            self, pair: tuple[Tensor, Tensor], scale: float, *, mask: Tensor, debug: str, extra: dict[str, Tensor]
        ) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
            x, y = pair
            x = super().forward(x * mask) * scale + extra["shift"]
            return (x, functional.dropout(y, 0.2) + x), {"x": x, "debug": debug}

    def step(model: Net) -> Tensor:
        pair = (model.first(rows()), rows(2))
        for index, block in enumerate(model.blocks):
            pair, named = block(pair, 0.5, mask=rows(index) > 0, debug="yes", extra={"shift": pair[0].tanh()})
            assert named["debug"] == "yes"
        return (model.last(pair[0]) + model.last(pair[1]) + named["x"].mean()).mean()

    check_same(make_net(Odd), options, step)


@each_mode
@pytest.mark.parametrize("block", [DropoutBlock, AttentionBlock, BatchNormBlock, ConvolutionBlock])
def test_autocast(block: type[Block], options: RecomputeConfig) -> None:
    def step(model: Net) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(rows()).float()

    check_same(make_net(block), options, step)


def test_gradients_of_gradients() -> None:
    def step(model: Net) -> Tensor:
        x = rows().requires_grad_()
        (slope,) = torch.autograd.grad(model(x), x, create_graph=True)
        return slope.square().mean()

    check_same(make_net(), FULL, step)


def test_a_retained_graph_leaves_buffers_alone_too() -> None:
    model = make_net(BatchNormBlock)
    with recomputing(model, FULL):
        loss = model(rows())
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        loss.backward(retain_graph=True)
        first = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        loss.backward()
        second = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(two, one * 2) for one, two in zip(first, second, strict=True))
    assert model.runs == [3] * 4
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert {int(block.norm.num_batches_tracked) for block in model.blocks} == {1}


def test_an_error_in_a_block_leaves_it_usable() -> None:
    class Picky(BatchNormBlock):
        def forward(self, x: Tensor) -> Tensor:
            if x.isnan().any():
                raise ValueError("not a number")
            return super().forward(x)

    model = make_net(Picky)
    with recomputing(model, FULL):
        with pytest.raises(ValueError, match="not a number"):
            model(rows() * float("nan"))
        model(rows()).backward()
    assert {int(block.norm.num_batches_tracked) for block in model.blocks} == {1}


# -- less memory


def test_what_is_inside_a_block_is_dropped() -> None:
    model = make_net()
    loss = model(rows())
    assert all(block.inner() is not None for block in model.blocks)
    loss.backward()
    with recomputing(model, EVERY_2):
        loss = model(rows())
        assert [block.inner() is None for block in model.blocks] == [True, False, True, False]
        loss.backward()


def test_bytes_kept_by_mode() -> None:
    """Each block keeps its input and one row."""
    model = make_net()
    assert kept_bytes(model) == OUTSIDE_BYTES + 4 * 2 * ROW_BYTES
    with recomputing(model, EVERY_2):
        assert kept_bytes(model) == OUTSIDE_BYTES + 2 * 2 * ROW_BYTES + 2 * ROW_BYTES
    with recomputing(model, FULL):
        assert kept_bytes(model) == OUTSIDE_BYTES + 4 * ROW_BYTES


class Products(TorchDispatchMode):
    """Counts the matrix products that are really computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "count"), [("off", 0), ("full", 4), ("every_n", 2), ("selective", 0)])
def test_products_that_run_again(mode: str, count: int) -> None:
    """A block's second product does not: nothing after it is kept, so that its recomputation ends before."""
    model = make_net()
    with recomputing(model, RecomputeConfig(mode=mode)):
        loss = model(rows())
        with Products() as products:
            loss.backward()
    assert products.count == count


# -- when and where


def test_only_training_with_gradients_recomputes() -> None:
    model = make_net(BatchNormBlock)
    with recomputing(model, FULL):
        with torch.no_grad():
            model(rows())
        with torch.inference_mode():
            model(rows())
        assert model.runs == [2] * 4
        model.eval()
        model(rows()).backward()
        assert model.runs == [3] * 4
        model.train()
        model(rows()).backward()
        assert model.runs == [5] * 4


def test_off_does_nothing() -> None:
    model = make_net()
    with recomputing(model, RecomputeConfig()) as recomputation:
        model(rows()).backward()
        assert recomputation.settle() is None
    assert model.runs == [1] * 4
    assert recomputation.blocks == ()


def test_names_stay_and_release_restores() -> None:
    model = make_net()
    names, attributes = list(model.state_dict()), [set(vars(block)) for block in model.blocks]
    recomputation = Recomputation(model, FULL)
    for _ in range(2):
        recomputation.attach()
    assert list(model.state_dict()) == names
    loss = model(rows())
    for _ in range(2):
        recomputation.release()
    loss.backward()  # a forward that ran before still has its backward
    assert model.runs == [2] * 4
    model(rows()).backward()
    assert model.runs == [3] * 4
    assert [set(vars(block)) for block in model.blocks] == attributes
    recomputation.attach()
    model(rows()).backward()
    assert model.runs == [5] * 4


def test_a_later_recomputation_takes_over() -> None:
    model = make_net()
    earlier = Recomputation(model, FULL)
    earlier.attach()
    with recomputing(model, EVERY_2):
        model(rows()).backward()
        earlier.release()
        model(rows()).backward()
    assert model.runs == [4, 3, 4, 3]  # the earlier one still acted on blocks 1 and 3 in the first step
    model(rows()).backward()
    assert model.runs == [5, 4, 5, 4]


def test_something_put_around_it_is_left_there() -> None:
    model = make_net()
    recomputation = Recomputation(model, FULL)
    recomputation.attach()
    inner = model.blocks[0].forward
    model.blocks[0].forward = lambda x: inner(x) * 2
    recomputation.release()
    model(rows()).backward()
    assert model.runs == [1] * 4
    assert torch.equal(model.blocks[0](rows()), inner(rows()) * 2)


def test_copies_use_their_own_parameters() -> None:
    model = make_net(BatchNormBlock)
    with recomputing(model, BUDGET):
        model(rows()).backward()
        other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.zero_()
    other(rows()).backward()
    assert other(rows()).item() == 0.0
    assert {int(block.norm.num_batches_tracked) for block in model.blocks} == {1}
    assert {int(block.norm.num_batches_tracked) for block in other.blocks} == {3}
    assert other.runs == [5] * 4  # 2 of the original, 2 with backward, 1 without


def test_every_nth_block() -> None:
    model = make_net(count=5)
    with recomputing(model, RecomputeConfig(mode="every_n", every=3)):
        model(rows()).backward()
    assert model.runs == [2, 1, 1, 2, 1]


def test_named_blocks() -> None:
    model = make_net()
    with recomputing(model, RecomputeConfig(mode="full", modules=["blocks.[12]"])) as recomputation:
        model(rows()).backward()
        assert recomputation.describe() == (
            "recompute=full: 2 of 2 blocks run again in backward: blocks.1-2 (named: blocks.[12])"
        )
    assert model.runs == [1, 2, 2, 1]


def test_a_block_inside_another_runs_again_with_it() -> None:
    model = make_net()
    with recomputing(model, RecomputeConfig(mode="full", modules=["Block", "Linear"])) as recomputation:
        assert [block.name for block in recomputation.blocks] == [
            *("first", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "last")
        ]
    check_same(make_net(), RecomputeConfig(mode="full", modules=["Block", "Linear"]))


def test_blocks_may_share_parameters() -> None:
    model = make_net()
    for block in model.blocks:
        block.up.weight = model.first.weight
    check_same(model, FULL)
    assert model.runs == [4] * 4


def test_single_layers_are_not_worth_it() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ConfigError, match=r"no blocks in Sequential.*recompute\.modules=\[Block\]"):
        Recomputation(model, FULL)
    assert len(Recomputation(model, RecomputeConfig(mode="full", modules=["Linear"])).blocks) == 2
