"""How tensors are cut and summed: pure."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.comm.codecs import CODECS, codec_of
from lightning_dist.comm.legs import part_bounds, parts_of, sum_in_order
from lightning_dist.errors import UnknownOptionError


@given(st.integers(0, 10_000), st.integers(1, 200))
def test_parts_cover_all_in_order_and_differ_little(length: int, width: int) -> None:
    bounds = part_bounds(length, width)
    assert len(bounds) == width
    assert bounds[0][0] == 0
    assert bounds[-1][1] == length
    assert all(high == low for (_, high), (low, _) in itertools.pairwise(bounds))
    sizes = [high - low for low, high in bounds]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == -(-length // width)


def test_parts_are_views() -> None:
    tensor = torch.zeros(5)
    for part in parts_of(tensor, 3):
        part.fill_(1)
    assert tensor.tolist() == [1.0] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8])
def test_sums_and_maxima(dtype: torch.dtype) -> None:
    terms = [torch.tensor(values, dtype=dtype) for values in ([1, 2, 3], [4, 0, 1], [2, 9, 1])]
    out = torch.empty(3, dtype=dtype)
    sum_in_order(terms, out)
    assert out.tolist() == [7, 11, 5]
    sum_in_order(terms, out, maximum=True)
    assert out.tolist() == [4, 9, 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_rounded_once(dtype: torch.dtype) -> None:
    terms = [torch.tensor([256.0], dtype=dtype)] + [torch.tensor([0.5], dtype=dtype)] * 8
    out = torch.empty(1, dtype=dtype)
    sum_in_order(terms, out)
    assert out.item() == 260.0 if dtype is torch.float16 else 260.0
    sum_in_order(
        [torch.tensor([60000.0], dtype=torch.float16)] * 2, (half := torch.empty(1, dtype=torch.float16)), scale=0.5
    )
    assert half.item() == 60000.0


def test_the_sum_may_go_where_the_first_term_is() -> None:
    first = torch.tensor([1.0, 2.0])
    sum_in_order([first, torch.tensor([3.0, 4.0])], first, scale=0.5)
    assert first.tolist() == [2.0, 3.0]


# -- codecs ------------------------------------------------------------------------------------------------------------


def test_bf16_costs_two_bytes_and_rounds_to_nearest_even() -> None:
    codec = codec_of("bf16")
    assert codec is not None
    assert codec.bytes_per_value == 2
    values = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -3.14159], dtype=torch.float32)
    encoded, decoded = torch.empty(4, dtype=torch.bfloat16), torch.empty(4)
    codec.encode(values, encoded)
    codec.decode(encoded, decoded)
    assert decoded[:3].tolist() == [1.0, 1.0, 1 + 2**-6]  # ties go to the even neighbour
    assert abs(decoded[3].item() - values[3].item()) <= 3.14159 * 2**-8
    again = torch.empty(4, dtype=torch.bfloat16)
    codec.encode(decoded, again)
    assert torch.equal(again, encoded), "what is decoded is encoded as the same"


@pytest.mark.parametrize(
    ("dtype", "applies"),
    [
        (torch.float64, True),
        (torch.float32, True),
        (torch.float16, False),
        (torch.bfloat16, False),
        (torch.int64, False),
        (torch.uint8, False),
    ],
)
def test_a_codec_applies_where_it_saves(dtype: torch.dtype, applies: bool) -> None:
    codec = codec_of("bf16")
    assert codec is not None
    assert codec.applies_to(dtype) is applies


def test_names_of_codecs() -> None:
    assert list(CODECS) == ["same", "bf16"]
    assert codec_of("same") is None
    with pytest.raises(UnknownOptionError, match="allowed: same, bf16"):
        codec_of("bf61")
