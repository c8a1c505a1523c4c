"""Packing: each token once, no row too long, nothing predicted over a boundary."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from lightning_dist.data.packing import (
    IGNORED,
    PackedRow,
    attention_mask,
    cu_seqlens,
    cut_documents,
    document_lengths,
    num_rows,
    pack,
    packed_row,
)

Lengths = st.lists(st.integers(1, 60), max_size=60)


def _of(lengths: list[int]) -> np.ndarray:
    return np.asarray(lengths, dtype=np.int64)


@given(lengths=Lengths, seq_len=st.integers(1, 40))
def test_each_token_is_in_one_row_once(lengths: list[int], seq_len: int) -> None:
    rows = pack(_of(lengths), seq_len=seq_len)
    taken = [token for row in rows for part in row for token in range(part.start, part.start + part.length)]
    assert sorted(taken) == list(range(sum(lengths)))
    assert all(sum(part.length for part in row) <= seq_len for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert num_rows(_of(lengths), seq_len=seq_len) == len(rows)


@given(lengths=Lengths, seq_len=st.integers(1, 40))
def test_documents_that_fit_are_not_cut(lengths: list[int], seq_len: int) -> None:
    starts = np.cumsum([0, *lengths]).tolist()
    parts = {part.start: part for row in pack(_of(lengths), seq_len=seq_len) for part in row}
    for start, length in zip(starts, lengths, strict=False):
        if length <= seq_len:
            assert parts[start].length == length
            assert not parts[start].goes_on


@given(lengths=Lengths, seq_len=st.integers(1, 40))
def test_rows_are_few(lengths: list[int], seq_len: int) -> None:
    """Two rows that are not full of one document would have fitted together only if neither is half full."""
    rows = pack(_of(lengths), seq_len=seq_len)
    filled = [sum(part.length for part in row) for row in rows]
    assert sum(2 * fill <= seq_len for fill in filled) <= 1
    assert len(rows) <= 2 * sum(lengths) / seq_len + 1


@settings(deadline=None)
@given(lengths=Lengths, seq_len=st.integers(1, 40))
def test_targets_are_the_next_tokens_of_the_same_document(lengths: list[int], seq_len: int) -> None:
    tokens = np.arange(100, 100 + sum(lengths), dtype=np.uint16)
    document = np.repeat(np.arange(len(lengths)), lengths)
    predicted = []
    for parts in pack(_of(lengths), seq_len=seq_len):
        row = packed_row(tokens, parts, seq_len=seq_len)
        for token, target, position, number in zip(*(column.tolist() for column in row), strict=True):
            if number < 0:
                assert (token, target, position) == (0, IGNORED, 0)
                continue
            part = parts[number]
            assert token == 100 + part.start + position
            if target != IGNORED:
                assert target == token + 1
                assert document[target - 100] == document[token - 100]
                predicted.append(target)
    # All but each document's first token.
    firsts = set((100 + np.cumsum([0, *lengths])).tolist())
    assert sorted(predicted) == [token for token in tokens.tolist() if token not in firsts]


@given(
    tokens=st.lists(st.integers(0, 3), max_size=80),
    chunk_tokens=st.integers(1, 30),
)
def test_chunks_end_with_documents(tokens: list[int], chunk_tokens: int) -> None:
    array = np.asarray(tokens, dtype=np.uint8)
    lengths = document_lengths(array, 0)
    assert lengths.sum() == len(tokens)
    ends = np.cumsum(lengths).tolist()
    assert all(tokens[end - 1] == 0 for end in ends[:-1])
    cuts = cut_documents(lengths, chunk_tokens=chunk_tokens)
    assert not tokens or cuts[-1] == len(tokens)
    for start, stop in zip([0, *cuts], cuts, strict=False):
        assert 0 < stop - start <= chunk_tokens
        if stop not in ends:  # only where nothing ends in it
            assert stop - start == chunk_tokens
            assert not any(start < end <= stop for end in ends)


def test_usual_documents_leave_little_room() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, 4000).astype(np.int64) + 1
    rows = num_rows(lengths, seq_len=2048)
    assert rows <= 1.001 * np.ceil(lengths.sum() / 2048)


def test_attention_stays_in_documents() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, -1], [0, 1, 2, 2, -1, -1]])
    mask = attention_mask(documents)
    assert mask.shape == (2, 1, 6, 6)
    for row in range(2):
        for query in range(6):
            for key in range(6):
                same = documents[row, query] == documents[row, key]
                assert mask[row, 0, query, key] == (same and key <= query)
    assert attention_mask(documents, causal=False).sum() == 4 + 9 + 1 + 1 + 1 + 4 + 4


def test_packed_attention_is_that_of_documents_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    documents = torch.tensor([[0, 0, 0, 1, 1, -1, -1]])
    query, key, value = (torch.randn(1, 2, 7, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    packed = attend(query, key, value, attn_mask=attention_mask(documents))
    assert not packed.isnan().any()
    for part in (slice(0, 3), slice(3, 5)):
        alone = attend(query[:, :, part], key[:, :, part], value[:, :, part], is_causal=True)
        torch.testing.assert_close(packed[:, :, part], alone)  # other order of sums


def test_cu_seqlens_bound_documents() -> None:
    bounds, longest = cu_seqlens(torch.tensor([[0, 0, 1, 1, 1, -1], [-1, -1, -1, -1, -1, -1]]))
    assert bounds.tolist() == [0, 2, 5, 6, 12]
    assert bounds.dtype == torch.int32
    assert longest == 6


def test_rows_collate_to_a_batch() -> None:
    tokens = np.arange(1, 8, dtype=np.uint8)
    rows = [packed_row(tokens, parts, seq_len=4) for parts in pack(_of([3, 4]), seq_len=4)]
    batch = torch.utils.data.default_collate(rows)
    assert isinstance(batch, PackedRow)
    assert batch.tokens.tolist() == [[1, 2, 3, 0], [4, 5, 6, 7]]
    assert batch.targets.tolist() == [[2, 3, IGNORED, IGNORED], [5, 6, 7, IGNORED]]
    assert batch.document_ids.tolist() == [[0, 0, 0, -1], [0, 0, 0, 0]]


@pytest.mark.parametrize("lengths", [[], [5], [4, 4]])
def test_small_cases(lengths: list[int]) -> None:
    assert [[tuple(part) for part in row] for row in pack(_of(lengths), seq_len=4)] == {
        0: [],
        1: [[(0, 4, True)], [(4, 1, False)]],
        2: [[(0, 4, False)], [(4, 4, False)]],
    }[len(lengths)]
