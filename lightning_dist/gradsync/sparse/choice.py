"""Whether a table's gradient travels as rows or whole, from how many of its rows were in the last one. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_dist.gradsync.sparse.rows import Table
from lightning_dist.laws import row_break_even_share

_BACK = 0.8  # to rows again only well below the limit, so that the way does not change at each step
_RATE_BYTES_PER_S = 125e6  # of a link that was not measured: 1 Gbit/s
_HOST_RATE_BYTES_PER_S = 1e9  # between processes of a host, by sockets


@dataclass(frozen=True)
class Limit:
    """From which share of rows on a whole table is cheaper.

    Attributes:
        share: Rows with gradients over all rows, 0 to 1; infinite where nothing is ever sent whole.
        reason: Where it comes from, in words.
    """

    share: float
    reason: str

    def is_dense(self, share: float, *, was_dense: bool) -> bool:
        """Whether the next gradient travels whole."""
        return share >= (self.share * _BACK if was_dense else self.share)


def limit_of(table: Table, *, given: float | None, rate_bytes_per_s: float | None, crosses: bool) -> Limit:
    """The limit for a table.

    Args:
        table: Whose rows they are.
        given: What the user wants; ``None``: by cost.
        rate_bytes_per_s: Of the slowest link, if it was measured.
        crosses: Whether there are several hosts.
    """
    if given is not None:
        return Limit(given if given < 1 else math.inf, "sync.sparse.dense_above")
    assumed = _RATE_BYTES_PER_S if crosses else _HOST_RATE_BYTES_PER_S
    rate = rate_bytes_per_s or assumed
    share = row_break_even_share(table.row_bytes, table.index_bytes, rate_bytes_per_s=rate)
    known = "measured" if rate_bytes_per_s else "assumed"
    return Limit(share, f"the cost of rows of {table.row_bytes} bytes at {rate / 1e6:,.0f} MB/s, {known}")
