"""The legs that rows take: to their owners in the host, between the owners of several hosts, and back.

They are those of a dense all-reduce (:mod:`lightning_dist.topology.hierarchy`), with rows in place of elements: where a
tensor is cut into runs, rows are dealt to owners one by one. Amounts differ from step to step and from rank to rank, so
each exchange tells the sizes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.gradsync.sparse.rows import Rows, Table, from_bytes, joined, merged, to_bytes

_SIZES, _ROWS = 0, 1  # tags


@dataclass
class Travel:
    """The rows of one table on their way.

    Attributes:
        table: What they are rows of.
        world_size: By which their sum is divided.
        held: What this rank has at the present level; ``None`` where it owns nothing.
    """

    table: Table
    world_size: int
    held: Rows | None

    @property
    def scales_first(self) -> bool:
        """Whether each term is divided instead of the sum, which could overflow."""
        return self.table.dtype is torch.float16


class HostRows:
    """A leg inside a host, or a switch: rows go up to owners, who merge them, and come back.

    Args:
        collectives: The seam.
        up: Group of the way to the owners; ``None`` if this rank is alone in it.
        down: Another group of the same ranks, for the way back.
        width: The first ``width`` members own rows.
        stride: Product of the widths of the legs below.
    """

    def __init__(
        self, collectives: Collectives, up: RankGroup | None, down: RankGroup | None, *, width: int, stride: int
    ) -> None:
        self._collectives = collectives
        self._up = up
        self._down = down
        self._width = width
        self._stride = stride

    def reduce(self, travel: Travel) -> None:
        """Give each owner its rows; hold those that this rank owns, merged."""
        rows, group = travel.held, self._up
        if rows is None or group is None:
            return
        parts = [rows.of_part(owner, parts=self._width, stride=self._stride) for owner in range(self._width)]
        outgoing = {owner: to_bytes(part, travel.table) for owner, part in enumerate(parts) if owner != group.index}
        is_owner = group.index < self._width
        sources = [i for i in range(group.size) if i != group.index] if is_owner else []
        received = exchange(outgoing, sources, travel.table, group, self._collectives, operation="reduce_scatter")
        travel.held = _summed({**received, group.index: parts[group.index]}) if is_owner else None

    def gather(self, travel: Travel) -> None:
        """Give each member the rows of all owners."""
        group = self._down
        if group is None:
            return
        others = [i for i in range(group.size) if i != group.index]
        outgoing = {} if travel.held is None else dict.fromkeys(others, to_bytes(travel.held, travel.table))
        owners = [i for i in range(self._width) if i != group.index]
        received = exchange(outgoing, owners, travel.table, group, self._collectives, operation="all_gather")
        own = [travel.held] if travel.held is not None else []
        travel.held = joined([*own, *received.values()])


class CrossRows:
    """The leg between those who own the same rows: on several hosts, or on all ranks where there is no leg below.

    Two give each other all they have. More deal the rows once more, merge what they own, and give that to all: each
    sends (n-1)/n of its rows and of the union, where sending all to all would be n-1 times its rows.

    Args:
        collectives: The seam.
        group: Who owns the same rows; ``None`` if this rank owns none, or there is nobody else.
        stride: Product of the widths of the legs below.
    """

    def __init__(self, collectives: Collectives, group: RankGroup | None, *, stride: int) -> None:
        self._collectives = collectives
        self._group = group
        self._stride = stride

    def reduce(self, travel: Travel) -> None:
        """Hold the mean of the rows that this rank owns."""
        if travel.held is None:
            return
        if self._group is not None:
            travel.held = self._sum(travel.held, travel.table, self._group)
        if not travel.scales_first and travel.world_size > 1:
            travel.held = Rows(travel.held.indices, travel.held.values / travel.world_size)

    def _sum(self, rows: Rows, table: Table, group: RankGroup) -> Rows:
        others = [i for i in range(group.size) if i != group.index]
        if group.size == 2:
            outgoing = dict.fromkeys(others, to_bytes(rows, table))
            return _summed({**exchange(outgoing, others, table, group, self._collectives), group.index: rows})
        parts = [rows.of_part(i, parts=group.size, stride=self._stride) for i in range(group.size)]
        outgoing = {i: to_bytes(parts[i], table) for i in others}
        received = exchange(outgoing, others, table, group, self._collectives, operation="reduce_scatter")
        own = _summed({**received, group.index: parts[group.index]})
        shared = exchange(dict.fromkeys(others, to_bytes(own, table)), others, table, group, self._collectives)
        return joined([own, *shared.values()])


def exchange(
    outgoing: Mapping[int, Tensor],
    sources: Sequence[int],
    table: Table,
    group: RankGroup,
    collectives: Collectives,
    *,
    operation: str = "all_gather",
) -> dict[int, Rows]:
    """Send rows to some members of a group and receive theirs; every member calls it, with lists that match.

    Args:
        outgoing: Position in the group -> rows for it, in bytes.
        sources: Positions of those who send to this rank, in any order.
        table: What they are rows of.
        group: Who takes part.
        collectives: The seam.
        operation: What it makes up together, for events and errors.

    Returns:
        Position -> its rows.
    """
    device = torch.device("cpu") if collectives.blocks_host else torch.device("cuda", torch.cuda.current_device())
    sizes = [(i, torch.tensor([rows.numel()], device=device)) for i, rows in outgoing.items()]
    expected = [(i, torch.zeros(1, dtype=torch.int64, device=device)) for i in sources]
    collectives.start_exchange(sizes, expected, group, operation, _SIZES).wait()
    received = [(i, torch.empty(int(size), dtype=torch.uint8, device=device)) for i, size in expected]
    collectives.start_exchange(list(outgoing.items()), received, group, operation, _ROWS).wait()
    return {i: from_bytes(rows, table) for i, rows in received}


def _summed(terms: Mapping[int, Rows]) -> Rows:
    """The sum in the order of members."""
    return merged([terms[member] for member in sorted(terms)])
