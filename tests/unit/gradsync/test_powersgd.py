"""The pure part of PowerSGD, and what is kept of it."""

from __future__ import annotations

import pytest
import torch

from lightning_dist.config import PowerSGDConfig
from lightning_dist.errors import ConfigError
from lightning_dist.gradsync.powersgd.factors import Shape, description, first_factor, matrix_of, orthonormal
from lightning_dist.gradsync.powersgd.state import LowRankFeedback, owe, owed


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ((256, 64), Shape(256, 64)),
        ((64, 8, 3, 3), Shape(64, 72)),
        ((4096,), None),
        ((), None),
        ((8, 8), None),  # two factors of four columns are as large
        ((16, 15), None),
        ((4096, 4), None),
        ((0, 64), None),
        ((16, 16), Shape(16, 16)),
    ],
)
def test_matrices_are_what_factors_make_smaller_by_half(sizes: tuple[int, ...], shape: Shape | None) -> None:
    assert matrix_of(sizes, 4) == shape


def test_what_becomes_of_a_model_is_said() -> None:
    said = description([(256, 64), (64,), (0, 5)], 4)
    assert said.startswith("1 matrices as two factors of 4 columns, 2 other parameters exact: 1,344 values of 16,448")
    assert said.endswith("1/12.2")


def test_first_factors_follow_name_and_window() -> None:
    one = first_factor("layer.weight", 30, 4, window=3)
    torch.randn(5)  # other random numbers do not matter
    assert torch.equal(one, first_factor("layer.weight", 30, 4, window=3))
    assert not torch.equal(one, first_factor("layer.weight", 30, 4, window=4))
    assert not torch.equal(one, first_factor("other.weight", 30, 4, window=3))


def test_columns_become_orthonormal_whatever_they_are() -> None:
    dependent = torch.ones(9, 3)
    for values in (torch.randn(9, 3), dependent, torch.zeros(9, 3), 1e30 * torch.randn(9, 3)):
        columns = orthonormal(values)
        torch.testing.assert_close(columns.T @ columns, torch.eye(3), rtol=0, atol=1e-5)


def test_a_matrix_of_low_rank_is_its_product() -> None:
    matrix = torch.randn(40, 2) @ torch.randn(2, 30)
    first = orthonormal(matrix @ first_factor("m", 30, 2, window=0))
    torch.testing.assert_close(first @ (matrix.T @ first).T, matrix, rtol=1e-4, atol=1e-4)


def state(*, rank: int = 0, world_size: int = 2, layout: str = "two") -> LowRankFeedback:
    return LowRankFeedback(layout=layout, rank=rank, world_size=world_size, columns=2, warm_start=True)


def test_what_is_kept_goes_on_where_ranks_are_the_same() -> None:
    first = state()
    owe(first.enter_parameter("m", torch.zeros(6)), torch.arange(6.0))
    first.keep_factor("m", torch.full((3, 2), 5.0))
    second = state()
    second.load_state_dicts([first.state_dict()], torch.device("cpu"))
    left = owed(second.enter_parameter("m", torch.zeros(6)))
    assert left is not None
    assert torch.equal(left, torch.arange(6.0))
    assert torch.equal(second.factor("m", 3, torch.device("cpu"), window=0), torch.full((3, 2), 5.0))


def test_others_take_over_what_is_owed_and_begin_with_new_factors() -> None:
    before = [state(rank=rank) for rank in (0, 1)]
    for each in before:
        owe(each.enter_parameter("m", torch.zeros(6)), torch.full((6,), 2.0))
        each.keep_factor("m", torch.full((3, 2), 5.0))
    alone = state(world_size=1, layout="one")
    alone.load_state_dicts([each.state_dict() for each in before], torch.device("cpu"), window=7)
    gradient = torch.zeros(6)
    alone.enter_parameter("m", gradient)
    assert torch.equal(gradient, torch.full((6,), 2.0)), "the mean of what two ranks owed"
    expected = first_factor("m", 3, 2, window=7)
    assert torch.equal(alone.factor("m", 3, torch.device("cpu"), window=7), expected)


def test_a_factor_of_another_size_is_not_used() -> None:
    kept = state()
    kept.keep_factor("m", torch.ones(3, 2))
    assert kept.factor("m", 4, torch.device("cpu"), window=0).shape == (4, 2)


@pytest.mark.parametrize("rank", [0, -1, 2.5, True])
def test_ranks_are_whole_numbers_from_1(rank: float) -> None:
    with pytest.raises(ConfigError, match=r"sync\.powersgd\.rank"):
        PowerSGDConfig(rank=rank)  # type: ignore[arg-type]
