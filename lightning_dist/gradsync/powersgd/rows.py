"""Matrices whose rows are dealt to the ranks of each host, as under ``parallel=zero2``: the same products.

Gradients are averaged in a host first, exact, and each of its ranks has some rows of that mean. ``P = M Q`` is computed
by rows, where the rows are. ``Q = M^T P`` is a sum over rows, so each rank adds what its own give. Both are thin, and
travel by the all-reduce: of P, each rank puts in its rows, and zeros for the others. So a rank multiplies, and keeps
what is owed, of its rows only.

The means are those of :mod:`~lightning_dist.gradsync.powersgd.scheme`, and so are the bytes between hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.futures import Future
from torch.nn import functional as F  # noqa: N812  # the name everybody uses

from lightning_dist.comm.feedback import Account, Origin
from lightning_dist.comm.hierarchical import HierarchicalAllReduce
from lightning_dist.comm.legs import keep_for_current_stream
from lightning_dist.comm.row_blocks import PlacedRows, RowBlock, Rows
from lightning_dist.gradsync.powersgd.factors import Shape, as_good, matrix_of, orthonormal
from lightning_dist.gradsync.powersgd.state import LowRankFeedback


@dataclass
class _Part:
    """A parameter of a block on its way.

    Attributes:
        placed: Where it is.
        shape: Of the matrix; ``None``: it stays exact.
        values: [k, columns], this rank's rows with what is owed.
        low: Of the first of them.
        first: [rows, c]: the mean first factor, orthonormal; of what stays exact, the mean.
        second: [columns, c]: the factor begun with, then what this rank's rows add to the second, then its mean.
        is_good: [] bool, whether all is finite.
    """

    placed: PlacedRows
    shape: Shape | None
    values: torch.Tensor
    low: int
    first: torch.Tensor
    second: torch.Tensor
    is_good: torch.Tensor


@dataclass
class _Sent:
    """A block under way.

    Attributes:
        block: As given.
        values: [shards, n] with what is owed.
        parts: In the order of what was sent.
        mean: Of what was sent.
        put: Takes the result.
    """

    block: RowBlock
    values: torch.Tensor
    parts: list[_Part]
    mean: Future[torch.Tensor]
    put: Callable[[Rows], None]


class RowProducts:
    """See :class:`~lightning_dist.comm.row_blocks.RowAverage`.

    Args:
        all_reduce: How factors, and what stays exact, travel: over all ranks of all hosts.
        feedback: What is kept from step to step.
    """

    def __init__(self, all_reduce: HierarchicalAllReduce, feedback: LowRankFeedback) -> None:
        self.feedback = feedback
        self._all_reduce = all_reduce
        self._under_way: list[_Sent] = []

    def wants(self, parameters: Sequence[PlacedRows]) -> bool:
        """Whether a matrix is among them."""
        return any(matrix_of(placed.sizes, self.feedback.columns) is not None for placed in parameters)

    def settle(self, account: Account, origin: Origin, gradients: torch.Tensor) -> None:
        """See :class:`~lightning_dist.comm.row_blocks.RowAverage`."""
        self.feedback.settle_in(account, origin, gradients)

    @torch.no_grad()
    def start(self, block: RowBlock, put: Callable[[Rows], None]) -> None:
        """Send first factors and what stays exact."""
        keep_for_current_stream(block.values)
        kind = torch.promote_types(block.values.dtype, torch.float32)
        values = block.values.to(kind)
        slot = block.account.residues.get((block.place.kind, block.place.starts[0]))
        if slot is not None:
            values = values + slot[1]
        parts = [self._part(block, placed, values) for placed in block.parameters]
        sent = torch.cat([(part.first * block.weight).reshape(-1) for part in parts])
        self._under_way.append(_Sent(block, values, parts, self._all_reduce.start(sent), put))

    @torch.no_grad()
    def finish(self) -> None:
        """Take the means, send second factors, and give everybody the products."""
        under_way, self._under_way = self._under_way, []
        if not under_way:
            return
        for sent in under_way:
            _take_first(sent)
        matrices = [(sent.block, part) for sent in under_way for part in sent.parts if part.shape is not None]
        kind = max((part.second.dtype for _, part in matrices), key=lambda dtype: dtype.itemsize)
        own = [(part.second * block.weight).reshape(-1).to(kind) for block, part in matrices]
        total = self._all_reduce.start(torch.cat(own)).wait()
        for (_, part), second in zip(matrices, total.split([each.numel() for each in own]), strict=True):
            part.second = second.view_as(part.second).to(part.second.dtype)
        for sent in under_way:
            self._keep(sent)
            sent.put(_rows_of(sent))

    def forget(self) -> None:
        """See :class:`~lightning_dist.comm.row_blocks.RowAverage`."""
        self._under_way.clear()

    def close(self) -> None:
        """See :class:`~lightning_dist.comm.row_blocks.RowAverage`."""
        self._all_reduce.close()

    def _part(self, block: RowBlock, placed: PlacedRows, values: torch.Tensor) -> _Part:
        """Of a matrix, this rank's rows of the first factor in their place among zeros; else the rows themselves."""
        shape = matrix_of(placed.sizes, self.feedback.columns)
        count = placed.sizes[0]
        columns = torch.Size(placed.sizes[1:]).numel()
        own = _view_of(values, placed).reshape(-1, columns)
        low, second, first = block.first * placed.rows, own[:0], own
        if shape is not None:
            window = block.account.window
            second = self.feedback.factor(placed.name, columns, own.device, window=window).to(own.dtype)
            first = own @ second
        whole = first.new_zeros(count, first.shape[1])
        whole[low : low + len(first)] = first[: max(0, count - low)]
        return _Part(placed, shape, own, low, whole, second, torch.ones((), dtype=torch.bool, device=own.device))

    def _keep(self, sent: _Sent) -> None:
        """What the products leave out of this rank's rows is owed, and factors are begun with again."""
        block, feedback = sent.block, self.feedback
        lost = torch.zeros_like(sent.values, dtype=torch.float32)
        for part in sent.parts:
            if part.shape is None:
                continue
            product = _slice(part.first, part.low, len(part.values)) @ part.second.T
            left = torch.where(part.is_good, part.values - product, 0)
            _view_of(lost, part.placed).copy_(left.view(len(lost), part.placed.rows, -1))
            name, window = part.placed.name, block.account.window
            before = feedback.factor(name, len(part.second), lost.device, window=window)
            feedback.keep_factor(name, torch.where(part.is_good, part.second.float(), before))
        if block.account.keeps:
            block.account.residues[block.place.kind, block.place.starts[0]] = block.place, lost


def _take_first(sent: _Sent) -> None:
    """Wait for a block's means; of matrices make what this rank's rows add to the second factors."""
    mean = sent.mean.wait()
    for part, whole in zip(sent.parts, mean.split([part.first.numel() for part in sent.parts]), strict=True):
        part.first = whole.view_as(part.first)
        if part.shape is not None:
            part.is_good = as_good(part.first)
            part.first = orthonormal(torch.where(part.is_good, part.first, 0))
            part.second = part.values.T @ _slice(part.first, part.low, len(part.values))


def _rows_of(sent: _Sent) -> Rows:
    def rows(shard: int) -> torch.Tensor:
        whole = torch.zeros_like(sent.values[0])
        for part in sent.parts:
            own = _slice(part.first, shard * part.placed.rows, part.placed.rows)
            if part.shape is not None:
                own = torch.where(part.is_good, own @ part.second.T, torch.nan)
            _view_of(whole.unsqueeze(0), part.placed).copy_(own.view(1, part.placed.rows, -1))
        return whole

    return rows


def _view_of(shards: torch.Tensor, placed: PlacedRows) -> torch.Tensor:
    """[shards, rows, columns]: a parameter in some shards [shards, n]."""
    columns = torch.Size(placed.sizes[1:]).numel()
    part = shards[:, placed.offset : placed.offset + placed.rows * columns]
    view: torch.Tensor = part.unflatten(1, (placed.rows, columns))
    return view


def _slice(matrix: torch.Tensor, low: int, count: int) -> torch.Tensor:
    """[count, ...]: successive rows of a matrix, and zeros behind its end."""
    found = matrix[low : low + count]
    return F.pad(found, (0, 0, 0, count - len(found)))
