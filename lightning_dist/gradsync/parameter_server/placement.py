"""Which server has which rows of a table, and where; pure.

A table is cut into stripes, which are dealt to servers in turn. Rows of words, users or items are often sorted by how
frequent they are, so that one run a server would leave nearly all look-ups to the first; and each stripe is one piece
of a checkpoint, so that there are not too many.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STRIPES_PER_SERVER = 64


@dataclass(frozen=True)
class Placement:
    """Rows of a table on servers 0, 1, 2, ...

    Attributes:
        num_rows: Of the table.
        num_servers: That share it.
        stripe_rows: Rows of a stripe; the last one may have fewer.
    """

    num_rows: int
    num_servers: int
    stripe_rows: int

    @classmethod
    def of(cls, num_rows: int, num_servers: int) -> Placement:
        """In :data:`STRIPES_PER_SERVER` stripes a server, or as many as there are rows."""
        return cls(num_rows, num_servers, max(1, -(-num_rows // (STRIPES_PER_SERVER * num_servers))))

    def ranges_of(self, server: int) -> list[tuple[int, int]]:
        """(first row, one behind the last) of each stripe of a server, in the order in which it holds them."""
        step = self.stripe_rows * self.num_servers
        return [
            (low, min(low + self.stripe_rows, self.num_rows))
            for low in range(server * self.stripe_rows, self.num_rows, step)
        ]

    def rows_of(self, server: int) -> Tensor:
        """[k] of int64: the rows of a server, in the order in which it holds them."""
        ranges = [torch.arange(low, high) for low, high in self.ranges_of(server)]
        return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)

    def server_of(self, rows: Tensor) -> Tensor:
        """The server of each row."""
        return torch.div(rows, self.stripe_rows, rounding_mode="floor").remainder_(self.num_servers)

    def position_of(self, rows: Tensor) -> Tensor:
        """Where each row is on its server."""
        turn = torch.div(rows, self.stripe_rows * self.num_servers, rounding_mode="floor")
        return turn * self.stripe_rows + rows.remainder(self.stripe_rows)
