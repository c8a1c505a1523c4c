"""Gradients cut into shards by rows, as who averages rows of matrices is given them. The contract; it sends nothing.

The gradients of some parameters lie shard by shard in one tensor: in each shard as many rows of each parameter, one
parameter after another. The last shards of a parameter may have fewer rows, or none, and zeros instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from lightning_dist.comm.feedback import Account, Feedback, Origin, Place


@dataclass(frozen=True)
class PlacedRows:
    """Where a parameter is in each shard.

    Attributes:
        name: The parameter's.
        sizes: Of its dimensions; its rows are along the first.
        offset: Of its first element in a shard.
        rows: Rows of it in a shard, padding included.
    """

    name: str
    sizes: tuple[int, ...]
    offset: int
    rows: int


@dataclass(frozen=True)
class RowBlock:
    """Successive shards, averaged in a host; the ranks of a host have different ones, and together all.

    Attributes:
        values: [shards, n].
        first: Number of the first of them.
        parameters: In the order in which they lie in a shard.
        weight: What an element counts in the mean over all hosts.
        account: Of the tensor that they are a part of.
        place: Where they are in that tensor.
    """

    values: torch.Tensor
    first: int
    parameters: tuple[PlacedRows, ...]
    weight: float
    account: Account
    place: Place


class RowAverage(Protocol):
    """Averages blocks over hosts, each rank for its host. Every rank calls it alike.

    The sequence of calls: :meth:`start` for each tensor of gradients, from one thread at a time, in one order; then
    :meth:`finish`, from the thread that waits.
    """

    @property
    def feedback(self) -> Feedback:
        """What is kept from step to step."""

    def wants(self, parameters: Sequence[PlacedRows]) -> bool:
        """Whether any of them is to travel in another way than as it is."""

    def settle(self, account: Account, origin: Origin, gradients: torch.Tensor) -> None:
        """What is owed in an account goes with these gradients, which travel as they are.

        Args:
            account: Empty afterwards.
            origin: What the gradients are made of.
            gradients: Added to.
        """

    def start(self, block: RowBlock, put: Callable[[Rows], None]) -> None:
        """Begin to average a block.

        Args:
            block: This rank's.
            put: Called by :meth:`finish` with the mean.
        """

    def finish(self) -> None:
        """Wait for all that was started."""

    def forget(self) -> None:
        """Nobody waits for what was started: a backward has failed."""

    def close(self) -> None:
        """End lanes and groups. Safe to call twice."""


Rows = Callable[[int], torch.Tensor]
"""Gives a shard of a mean, by number; [n] floating."""
