"""Rows of a table as values: merged, dealt to owners, put into bytes. Nothing here talks to another rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dist.comm.legs import HALF_DTYPES

_LARGEST_INT32 = (1 << 31) - 1


@dataclass(frozen=True)
class Table:
    """What ranks must agree on to exchange rows.

    Attributes:
        shape: Of the whole table; the first axis counts its rows.
        dtype: Of its values.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return self.shape[0]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.shape[1:]

    @property
    def index_dtype(self) -> torch.dtype:
        """The smallest type that numbers the rows, and after which values of the table's type are aligned."""
        is_small = self.num_rows <= _LARGEST_INT32 and self.dtype.itemsize <= torch.int32.itemsize
        return torch.int32 if is_small else torch.int64

    @property
    def row_bytes(self) -> int:
        """Bytes of the values of one row."""
        return math.prod(self.row_shape) * self.dtype.itemsize

    @property
    def index_bytes(self) -> int:
        """Bytes of a row's number."""
        return self.index_dtype.itemsize


@dataclass(frozen=True)
class Rows:
    """Some rows of a table.

    Attributes:
        indices: [k] of int64, ascending, each once.
        values: [k, ...], row i of which belongs to ``indices[i]``.
    """

    indices: Tensor
    values: Tensor

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.indices.numel()

    def of_part(self, part: int, *, parts: int, stride: int = 1) -> Rows:
        """Those rows r with ``r // stride % parts == part``: neighbours go to different owners.

        Ids of words, users or items are often sorted by how frequent they are, so runs of rows would be unfair.
        """
        if parts == 1:
            return self
        chosen = torch.div(self.indices, stride, rounding_mode="floor").remainder_(parts) == part
        return Rows(self.indices[chosen], self.values[chosen])


def rows_of(gradient: Tensor) -> Rows:
    """The rows of a sparse COO tensor with one sparse axis; rows that it holds several times are summed.

    Raises:
        ValueError: It has several sparse axes.
    """
    if gradient.sparse_dim() != 1:
        raise ValueError(f"rows are those of a tensor with one sparse axis, got {gradient.sparse_dim()}")
    gradient = gradient.coalesce()
    return Rows(gradient.indices()[0], gradient.values())


def merged(terms: Sequence[Rows]) -> Rows:
    """The sum of some tables of which these are the rows; terms are added in their order.

    A row that is in some of them is in the sum, also where its values cancel out. Half types are summed in fp32 and
    rounded once.
    """
    if len(terms) == 1:
        return terms[0]
    indices, places = torch.unique(torch.cat([term.indices for term in terms]), return_inverse=True)
    like = terms[0].values
    sum_dtype = torch.float32 if like.dtype in HALF_DTYPES else like.dtype
    total = like.new_zeros((indices.numel(), *like.shape[1:]), dtype=sum_dtype)
    for term, place in zip(terms, places.split([term.count for term in terms]), strict=True):
        # A term has each row once, so the order of additions to a row is that of the terms, on any device.
        total.index_add_(0, place, term.values.to(sum_dtype))
    return Rows(indices, total.to(like.dtype))


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of some owners, none of which has a row of another's, in one."""
    if len(parts) == 1:
        return parts[0]
    indices, order = torch.sort(torch.cat([part.indices for part in parts]))
    return Rows(indices, torch.cat([part.values for part in parts])[order])


def to_bytes(rows: Rows, table: Table) -> Tensor:
    """[n] of uint8: the numbers of the rows, then their values."""
    indices = rows.indices.to(table.index_dtype).view(torch.uint8)
    return torch.cat([indices, rows.values.contiguous().view(-1).view(torch.uint8)])


def from_bytes(encoded: Tensor, table: Table) -> Rows:
    """What :func:`to_bytes` has put in."""
    count = encoded.numel() // (table.index_bytes + table.row_bytes)
    split = count * table.index_bytes
    indices = encoded[:split].view(table.index_dtype).to(torch.int64)
    return Rows(indices, encoded[split:].view(table.dtype).view(count, *table.row_shape))


def to_sparse(rows: Rows, table: Table) -> Tensor:
    """A coalesced sparse tensor of the table's shape."""
    return torch.sparse_coo_tensor(
        rows.indices.unsqueeze(0), rows.values, table.shape, is_coalesced=True, check_invariants=False
    )
