"""Documents packed into rows of equal length, and what a model needs to keep them apart.

Which document goes where follows from the lengths of a chunk's documents alone, so the number of rows is known before
anything is read, and a row is a sample like any other.

The packing is best-fit decreasing (Johnson, 1973): documents longer than a row are cut into full rows and a rest; then,
from the longest to the shortest, each goes into the row with the least room that still holds it. It needs at most
11/9 of the fewest rows possible, plus one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

IGNORED = -100
"""Target of positions that nothing is predicted at; ``torch.nn.functional.cross_entropy`` leaves them out."""


class Part(NamedTuple):
    """Consecutive tokens of one document in a row.

    Attributes:
        start: First token in the chunk.
        length: Tokens.
        goes_on: Whether the next token of the chunk is of the same document: a cut, not an end.
    """

    start: int
    length: int
    goes_on: bool


class PackedRow(NamedTuple):
    """A sample of packed documents; all tensors have one value a position.

    Attributes:
        tokens: (seq_len,) int64; padding is 0.
        targets: (seq_len,) int64; the next token of the same document, or :data:`IGNORED`.
        position_ids: (seq_len,) int64; counted from the start of each document's part.
        document_ids: (seq_len,) int64; counted in the row, -1 for padding.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor


def document_lengths(tokens: NDArray[np.generic], eos: int) -> NDArray[np.int64]:
    """Lengths of the documents in a chunk; each ends with its ``eos``, the last one may lack it."""
    ends = np.flatnonzero(tokens == eos) + 1
    if len(tokens) and (not len(ends) or ends[-1] != len(tokens)):
        ends = np.append(ends, len(tokens))
    return np.diff(ends, prepend=0).astype(np.int64)


def cut_documents(lengths: NDArray[np.int64], *, chunk_tokens: int) -> list[int]:
    """Where a shard is cut into chunks: after the last document that a chunk holds whole.

    Args:
        lengths: Of the shard's documents.
        chunk_tokens: A chunk has at most so many; a longer document is cut.

    Returns:
        Ends of the chunks, in tokens.
    """
    ends = np.cumsum(lengths)
    total, start, cuts = int(ends[-1]) if len(ends) else 0, 0, []
    while start < total:
        last = int(np.searchsorted(ends, start + chunk_tokens, side="right")) - 1
        stop = int(ends[last]) if last >= 0 and ends[last] > start else min(start + chunk_tokens, total)
        cuts.append(stop)
        start = stop
    return cuts


def pack(lengths: NDArray[np.int64], *, seq_len: int) -> list[list[Part]]:
    """Rows of a chunk, in the order of their first tokens.

    Args:
        lengths: Of the chunk's documents, in tokens.
        seq_len: Positions of a row.
    """
    rows: list[list[Part]] = []
    rests: list[Part] = []
    start = 0
    for length in lengths.tolist():
        stop = start + length
        while stop - start > seq_len:
            rows.append([Part(start, seq_len, True)])
            start += seq_len
        if stop > start:
            rests.append(Part(start, stop - start, False))
        start = stop
    rests.sort(key=lambda part: (-part.length, part.start))
    rows += _best_fit(rests, seq_len)
    for row in rows:
        row.sort()
    rows.sort()
    return rows


def _best_fit(parts: list[Part], seq_len: int) -> list[list[Part]]:
    rows: list[list[Part]] = []
    with_room: list[list[int]] = [[] for _ in range(seq_len + 1)]  # room -> rows that have exactly so much
    rooms = 0  # bit r is set if with_room[r] has a row: the lowest of the bits from a length on is the best fit
    for part in parts:
        fitting = rooms >> part.length
        if fitting:
            room = part.length + (fitting & -fitting).bit_length() - 1
            number = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
            rows[number].append(part)
        else:
            room, number = seq_len, len(rows)
            rows.append([part])
        room -= part.length
        if room:
            with_room[room].append(number)
            rooms |= 1 << room
    return rows


def num_rows(lengths: NDArray[np.int64], *, seq_len: int) -> int:
    """How many rows :func:`pack` makes."""
    return len(pack(lengths, seq_len=seq_len))


def packed_row(tokens: NDArray[np.generic], parts: list[Part], *, seq_len: int) -> PackedRow:
    """One row.

    Args:
        tokens: Of the chunk.
        parts: A row of :func:`pack`.
        seq_len: Positions of a row.
    """
    row = np.zeros(seq_len, dtype=np.int64)
    targets = np.full(seq_len, IGNORED, dtype=np.int64)
    positions = np.zeros(seq_len, dtype=np.int64)
    documents = np.full(seq_len, -1, dtype=np.int64)
    at = 0
    for number, (start, length, goes_on) in enumerate(parts):
        stop = at + length
        row[at:stop] = tokens[start : start + length]
        predicted = length - 1 + goes_on
        targets[at : at + predicted] = tokens[start + 1 : start + 1 + predicted]
        positions[at:stop] = np.arange(length)
        documents[at:stop] = number
        at = stop
    return PackedRow(*(torch.from_numpy(column) for column in (row, targets, positions, documents)))


def attention_mask(document_ids: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
    """Mask for ``torch.nn.functional.scaled_dot_product_attention``: true where a position may look.

    Block-diagonal: positions see their own document only. Padding sees padding, so that no row of a softmax is empty.

    Args:
        document_ids: (batch, seq_len), as a batch of :class:`PackedRow` has them.
        causal: Whether positions see only what comes before them, and themselves.

    Returns:
        (batch, 1, seq_len, seq_len) bool; broadcast over heads.
    """
    mask = document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)
    if causal:
        size = document_ids.shape[-1]
        mask &= torch.ones(size, size, dtype=torch.bool, device=document_ids.device).tril()
    return mask.unsqueeze(1)


def cu_seqlens(document_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Bounds of documents in a batch laid end to end, as attention for sequences of different lengths takes them.

    Args:
        document_ids: (batch, seq_len). Padding counts as one more document of its row.

    Returns:
        (documents + 1,) int32 from 0 to batch times seq_len, and the longest document's length.
    """
    flat = document_ids.reshape(-1)
    is_start = torch.ones_like(flat, dtype=torch.bool)
    is_start[1:] = flat[1:] != flat[:-1]
    is_start[:: document_ids.shape[-1]] = True
    ends = torch.tensor([len(flat)], device=flat.device)
    bounds = torch.cat([torch.nonzero(is_start).reshape(-1), ends]).to(torch.int32)
    return bounds, int(bounds.diff().max())
