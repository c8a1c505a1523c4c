"""Rows as values: merged, dealt, joined, put into bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.gradsync.sparse.rows import Rows, Table, from_bytes, joined, merged, rows_of, to_bytes, to_sparse

NUM_ROWS = 40
TABLE = Table((NUM_ROWS, 3), torch.float32)

ids = st.lists(st.integers(0, NUM_ROWS - 1), max_size=30)


def rows(chosen: list[int], offset: int = 0) -> Rows:
    """Each once, with values that are exact in any sum."""
    indices = torch.tensor(sorted(set(chosen)), dtype=torch.int64)
    return Rows(indices, (indices[:, None] * 3 + torch.arange(3) + offset).float())


def dense(some: Rows) -> torch.Tensor:
    whole = torch.zeros(TABLE.shape)
    whole[some.indices] = some.values
    return whole


@given(st.lists(ids, min_size=1, max_size=4))
def test_merged_rows_are_the_sum_of_the_tables(terms: list[list[int]]) -> None:
    some = [rows(chosen, offset) for offset, chosen in enumerate(terms)]
    total = merged(some)
    assert torch.equal(dense(total), torch.stack([dense(term) for term in some]).sum(0))
    assert total.indices.tolist() == sorted({index for chosen in terms for index in chosen})


@given(ids, st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 3), (3, 2)]))
def test_each_row_has_one_owner_at_each_level(chosen: list[int], widths: tuple[int, int]) -> None:
    inner, outer = widths
    some = rows(chosen)
    owned = [
        some.of_part(i, parts=inner).of_part(j, parts=outer, stride=inner) for i in range(inner) for j in range(outer)
    ]
    assert sum(part.count for part in owned) == some.count
    whole = joined(owned)
    assert torch.equal(whole.indices, some.indices)
    assert torch.equal(whole.values, some.values)


def test_neighbours_go_to_different_owners() -> None:
    """Of the most frequent ids, which come first, owners get alike, also at the second level."""
    some = rows(list(range(12)))
    at_both = [some.of_part(i, parts=2).of_part(j, parts=3, stride=2).count for i in range(2) for j in range(3)]
    assert at_both == [2] * 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("chosen", [[], [3], [1, 5, 39]], ids=len)
@pytest.mark.parametrize("shape", [(NUM_ROWS, 3), (NUM_ROWS,), (NUM_ROWS, 2, 2)], ids=str)
def test_bytes_and_back(dtype: torch.dtype, chosen: list[int], shape: tuple[int, ...]) -> None:
    table = Table(shape, dtype)
    values = torch.randn(len(chosen), *shape[1:]).to(dtype)
    some = Rows(torch.tensor(chosen, dtype=torch.int64), values)
    encoded = to_bytes(some, table)
    assert encoded.numel() == some.count * (table.row_bytes + table.index_bytes)
    back = from_bytes(encoded, table)
    assert torch.equal(back.indices, some.indices)
    assert torch.equal(back.values, some.values)


def test_large_tables_have_longer_numbers() -> None:
    assert Table((1 << 31, 1), torch.float32).index_bytes == 8
    assert Table(((1 << 31) - 1, 1), torch.float32).index_bytes == 4
    table, last = Table((1 << 40, 1), torch.float32), Rows(torch.tensor([(1 << 40) - 1]), torch.ones(1, 1))
    assert from_bytes(to_bytes(last, table), table).indices.tolist() == [(1 << 40) - 1]


def test_half_types_are_rounded_once() -> None:
    """256 + 1 is 256 in bfloat16, so adding one by one would stay there."""
    one = Rows(torch.tensor([0]), torch.ones(1, 1, dtype=torch.bfloat16))
    large = Rows(torch.tensor([0]), torch.full((1, 1), 256.0, dtype=torch.bfloat16))
    assert merged([large, one, one]).values.item() == 258.0


def test_rows_of_a_gradient_are_summed_where_it_has_them_twice() -> None:
    table = torch.nn.Embedding(NUM_ROWS, 3, sparse=True)
    table(torch.tensor([4, 2, 4])).sum().backward()
    assert table.weight.grad is not None
    some = rows_of(table.weight.grad)
    assert some.indices.tolist() == [2, 4]
    assert some.values.tolist() == [[1.0] * 3, [2.0] * 3]
    assert torch.equal(to_sparse(some, TABLE).to_dense(), table.weight.grad.to_dense())


def test_a_gradient_with_two_sparse_axes_is_refused() -> None:
    gradient = torch.eye(3).to_sparse()
    with pytest.raises(ValueError, match="one sparse axis, got 2"):
        rows_of(gradient)
