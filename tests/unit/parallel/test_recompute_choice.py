"""Which blocks a budget chooses: with plain numbers, and from what was measured; and the options."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dist import config
from lightning_dist.config import RecomputeConfig, parse_bytes
from lightning_dist.errors import ConfigError
from lightning_dist.parallel.recompute import Recomputation
from lightning_dist.parallel.recompute_choice import (
    BlockCost,
    Choice,
    choose_blocks,
    format_bytes,
    peak_bytes,
    with_typical_times,
)
from tests.unit.parallel.recomputed import (
    OUTSIDE_BYTES,
    ROW_BYTES,
    AttentionBlock,
    BatchNormBlock,
    Block,
    ConvolutionBlock,
    DropoutBlock,
    Net,
    kept_bytes,
    make_net,
    rows,
)

# -- the choice, with plain numbers


def cost(name: str, input_bytes: int, inner_bytes: int, forward_s: float, kind: str = "Block") -> BlockCost:
    return BlockCost(name, kind, input_bytes, inner_bytes, forward_s)


EQUAL = [cost(str(index), 10, 90, 1.0) for index in range(4)]


@pytest.mark.parametrize(
    ("budget_bytes", "recomputed", "kept", "peak"),
    [
        (400, (), 400, 400),
        (399, ("0",), 310, 310),  # 10 + 100 + 100 + 100
        (310, ("0",), 310, 310),
        (309, ("0", "1"), 220, 220),
        (130, ("0", "1", "2"), 130, 130),
        (129, ("0", "1", "2", "3"), 40, 130),  # does not fit: the last block needs all of its own when its turn comes
    ],
)
def test_equal_blocks_are_recomputed_from_the_first(
    budget_bytes: int, recomputed: tuple[str, ...], kept: int, peak: int
) -> None:
    choice = choose_blocks(EQUAL, budget_bytes)
    assert choice == Choice(recomputed, kept, peak, float(len(recomputed)), budget_bytes)
    assert choice.fits == (budget_bytes >= 130)


def test_cheap_bytes_go_first() -> None:
    costs = [
        cost("cheap", 10, 100, 1.0),
        cost("slow", 10, 100, 5.0),
        cost("small", 10, 20, 1.0),
        cost("last", 0, 1, 1.0),
    ]
    assert choose_blocks(costs, 200).recomputed == ("cheap",)
    assert choose_blocks(costs, 130).recomputed == ("cheap", "slow")


def test_the_earlier_block_helps_where_the_cheaper_one_cannot() -> None:
    """When the cheap block's turn comes, all of it is there beside what the slow one kept."""
    costs = [cost("slow", 10, 100, 5.0), cost("cheap", 10, 100, 1.0), cost("last", 0, 1, 1.0)]
    assert choose_blocks(costs, 200).recomputed == ("slow",)


def test_what_turns_out_needless_is_kept() -> None:
    """The small block is cheaper a byte, but the large one alone is enough."""
    costs = [cost("small", 0, 10, 0.1), cost("large", 0, 100, 2.0), cost("last", 0, 50, 1.0)]
    assert choose_blocks(costs, 110).recomputed == ("large",)


def test_nothing_to_recompute() -> None:
    assert choose_blocks([], 1024) == Choice((), 0, 0, 0.0, 1024)
    assert choose_blocks([cost("a", 5, 0, 1.0)], 4).recomputed == ("a",)


COSTS = st.lists(
    st.builds(cost, st.just(""), st.integers(0, 50), st.integers(0, 100), st.floats(0.125, 8.0)), max_size=7
)


@given(COSTS, st.integers(0, 500))
def test_a_choice_fits_if_any_does_and_holds_nothing_needless(costs: list[BlockCost], budget_bytes: int) -> None:
    costs = [cost(str(index), one.input_bytes, one.inner_bytes, one.forward_s) for index, one in enumerate(costs)]
    choice = choose_blocks(costs, budget_bytes)
    sets = [set(some) for count in range(len(costs) + 1) for some in itertools.combinations(range(len(costs)), count)]
    fitting = [some for some in sets if peak_bytes(costs, some) <= budget_bytes]
    chosen = {int(name) for name in choice.recomputed}
    assert choice.fits == bool(fitting)
    assert choice.peak_bytes == peak_bytes(costs, chosen) >= choice.kept_bytes
    if fitting:
        assert all(peak_bytes(costs, chosen - {index}) > budget_bytes for index in chosen)
    else:
        assert chosen == set(range(len(costs)))


def test_alike_blocks_cost_the_median() -> None:
    times = [9.0, 1.0, 1.5, 1.25, 2.0]
    costs = [cost(str(index), 1, 1, forward_s) for index, forward_s in enumerate(times)]
    costs += [cost("other size", 1, 2, 7.0), cost("other kind", 1, 1, 8.0, kind="Head")]
    assert [one.forward_s for one in with_typical_times(costs)] == [1.5] * 5 + [7.0, 8.0]


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (12_640_000, "12.6 MB"), (8 * 10**9, "8.0 GB")],
)
def test_sizes_as_text(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


# -- the choice, measured


class Clock:
    """Advances by a millisecond each time it is read."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1_000_000
        return self.now_ns


def settled(
    model: Net, budget_bytes: int, *, agree: Callable[[list[int]], list[int]] = list
) -> tuple[Recomputation, Choice]:
    options = RecomputeConfig(mode="budget", budget=budget_bytes)
    recomputation = Recomputation(model, options, agree=agree, clock_ns=Clock())
    recomputation.attach()
    model(rows()).backward()
    choice = recomputation.settle()
    assert choice is not None
    return recomputation, choice


@pytest.mark.parametrize(("budget_rows", "count"), [(32, 0), (31, 1), (24, 8), (18, 14), (17, 15)])
def test_blocks_are_chosen_from_what_was_measured(budget_rows: int, count: int) -> None:
    """A block keeps its input and one row, so that sixteen keep 32 rows, and with n recomputed 32 - n."""
    model = make_net(count=16)
    recomputation, choice = settled(model, budget_rows * ROW_BYTES)
    assert choice.recomputed == tuple(f"blocks.{index}" for index in range(count))
    assert choice.kept_bytes == choice.peak_bytes == budget_rows * ROW_BYTES
    assert choice.extra_s == pytest.approx(count * 1e-3)
    before = model.runs
    model(rows()).backward()
    again = [after - was - 1 for after, was in zip(model.runs, before, strict=True)]
    assert again == [1] * count + [0] * (16 - count)
    assert kept_bytes(model) == choice.kept_bytes + OUTSIDE_BYTES
    assert recomputation.settle() is None
    recomputation.release()


@pytest.mark.parametrize("block", [AttentionBlock, DropoutBlock, BatchNormBlock, ConvolutionBlock])
def test_measured_bytes_are_those_kept_without_recomputation(block: type[Block]) -> None:
    model = make_net(block)
    expected = kept_bytes(model)
    recomputation, choice = settled(make_net(block), 10**9)
    assert choice.recomputed == ()
    assert choice.kept_bytes + OUTSIDE_BYTES == expected
    recomputation.release()


def test_a_mask_that_all_blocks_take_counts_once() -> None:
    class Masked(Block):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x * mask)

    class MaskedNet(Net):
        def forward(self, x: Tensor) -> Tensor:
            x, mask = self.first(x), rows(5)
            for block in self.blocks:
                x = block(x, mask)
            return self.last(x).square().mean()

    recomputation, choice = settled(MaskedNet(Masked), 10**9)
    # Each block: its input, the product (the first linear's input) and the ReLU's result.
    assert choice.kept_bytes == 4 * 3 * ROW_BYTES + ROW_BYTES
    recomputation.release()


def test_a_budget_that_is_too_small_recomputes_all_and_says_so() -> None:
    model = make_net(count=16)
    recomputation, choice = settled(model, 16 * ROW_BYTES)
    assert not choice.fits
    assert len(choice.recomputed) == 16
    assert recomputation.shortfall is not None
    assert "recompute.budget=2.0 kB is too small" in recomputation.shortfall
    assert "still hold 2.2 kB" in recomputation.shortfall  # 17 rows
    model.zero_grad()
    before = model.runs
    model(rows()).backward()
    assert [after - was for after, was in zip(model.runs, before, strict=True)] == [2] * 16
    recomputation.release()


def test_ranks_agree_on_the_largest_measures() -> None:
    """Two ranks whose blocks differ in size choose alike, each in one exchange."""
    exchanged: list[list[int]] = []

    def first_pass(values: list[int]) -> list[int]:
        exchanged.append(values)
        return values

    for count_columns in (1, 3):
        model = make_net(count=16)
        recomputation = Recomputation(model, RecomputeConfig(mode="budget", budget=10**6), agree=first_pass)
        recomputation.attach()
        torch.cat([model(rows())[None] for _ in range(count_columns)]).sum().backward()
        recomputation.settle()
        recomputation.release()
    largest = [max(pair) for pair in zip(*exchanged, strict=True)]
    assert len(exchanged) == 2
    assert exchanged[0] != exchanged[1]
    budget_bytes = 16 * 2 * 3 * ROW_BYTES - 2 * ROW_BYTES
    choices = [settled(make_net(count=16), budget_bytes, agree=lambda _: list(largest)) for _ in range(2)]
    assert choices[0][1] == choices[1][1]
    assert choices[0][1].recomputed
    assert choices[0][1].kept_bytes > 16 * 2 * ROW_BYTES  # larger than what this rank alone measured


def test_a_block_that_did_not_run_stays_recomputed() -> None:
    class Skipping(Net):
        skip = True

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks[1:] if self.skip else self.blocks:
                x = block(x)
            return self.last(x).square().mean()

    model = Skipping()
    recomputation, choice = settled(model, 10**9)
    assert choice.recomputed == ()
    assert "not run when it was measured, and recomputed: blocks.0" in recomputation.describe()
    model.skip = False
    model(rows()).backward()
    assert model.runs == [2, 3, 3, 3]
    recomputation.release()


def test_measuring_ends_with_the_first_backward() -> None:
    """Micro-batches whose activations are there at the same time add up, later ones do not."""
    model = make_net()
    recomputation = Recomputation(model, RecomputeConfig(mode="budget", budget=10**6), clock_ns=Clock())
    recomputation.attach()
    losses = [model(rows(index)) for index in range(2)]
    for loss in losses:
        loss.backward()
        model(rows()).backward()
    choice = recomputation.settle()
    assert choice is not None
    assert choice.kept_bytes == 2 * 4 * 2 * ROW_BYTES
    recomputation.release()


def test_descriptions() -> None:
    model = make_net()
    found = "(repeated: 4 x Block in blocks)"

    def said(**options: Any) -> str:
        return Recomputation(model, RecomputeConfig(**options)).describe()

    assert said() == "recompute=off: every block keeps its activations until its backward"
    assert said(mode="full") == f"recompute=full: 4 of 4 blocks run again in backward: blocks.0-3 {found}"
    assert said(mode="every_n") == (
        f"recompute=every_n: 2 of 4 blocks (one of 2) run again in backward: blocks.0, blocks.2 {found}"
    )
    assert "except for matrix products" in said(mode="selective")
    assert "until one backward has been measured against 8GB: blocks.0-3" in said(mode="budget", budget="8GB")
    recomputation, choice = settled(make_net(count=16), 24 * ROW_BYTES)
    assert choice.extra_s == 0.008
    assert recomputation.describe() == (
        "recompute=budget (3.1 kB): 8 of 16 blocks run again in backward: blocks.0-7\n"
        "  predicted: 3.1 kB kept after forward, 3.1 kB at most in backward, 8.0 ms more a step"
    )
    recomputation.release()


# -- the options


@pytest.mark.parametrize(
    ("given", "size_bytes"),
    [(8000, 8000), ("8000", 8000), ("8GB", 8 * 10**9), ("512MiB", 512 * 2**20), ("1.5 GiB", 3 * 2**29), ("2kB", 2000)],
)
def test_bytes_have_units(given: int | str, size_bytes: int) -> None:
    assert parse_bytes("recompute.budget", given) == size_bytes
    assert RecomputeConfig(mode="budget", budget=given).budget_bytes == size_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fulll"}, "recompute.mode='fulll' is unknown; allowed: off, full, every_n.*Did you mean full"),
        ({"mode": "budget"}, r"needs recompute\.budget.*recompute\.budget=8GB"),
        ({"mode": "budget", "budget": "8Gb"}, r"recompute\.budget='8Gb' is no size.*GB.*GiB"),
        ({"mode": "budget", "budget": "lots"}, "is no size"),
        ({"mode": "budget", "budget": "-8GB"}, "is no size"),
        ({"mode": "budget", "budget": 0.5}, "is no size"),
        ({"mode": "budget", "budget": True}, "is no size"),
        ({"mode": "budget", "budget": 8}, "recompute.budget=8 bytes: must be at least 1024 bytes"),
        ({"budget": "8 apples"}, "is no size"),  # whatever the mode
        ({"mode": "every_n", "every": 0}, "recompute.every=0 blocks: must be at least 1 blocks"),
        ({"mode": "every_n", "every": 1.5}, "recompute.every=1.5 blocks: must be a whole number"),
        ({"mode": "full", "modules": "Block"}, "a list of class names"),
        ({"mode": "full", "modules": []}, "a list of class names"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RecomputeConfig(**options)


def test_presets_are_the_modes() -> None:
    assert set(config.RECOMPUTE_PRESETS) == set(config.RECOMPUTE_MODES)
    complete = {name: preset for name, preset in config.RECOMPUTE_PRESETS.items() if name != "budget"}
    assert all(config.resolve("recompute", name, RecomputeConfig, complete).mode == name for name in complete)
    assert config.resolve("recompute", {"mode": "budget", "budget": "1MB"}, RecomputeConfig, {}).budget_bytes == 10**6
