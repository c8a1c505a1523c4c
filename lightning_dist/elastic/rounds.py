"""A round: the ranks that train together, from a start to the next change of who takes part."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Seat:
    """A host in a round.

    Attributes:
        host: Its name.
        address: Under which the others reach it.
        num_ranks: How many ranks it runs.
        store_port: Where its agent's store of this round is; the ranks meet at the first host's.
    """

    host: str
    address: str
    num_ranks: int
    store_port: int = 0


@dataclass(frozen=True)
class Round:
    """Who trains together.

    Attributes:
        number: From 1; it only grows, whoever leads.
        seats: The hosts by node rank.
        run: Names the run, the same for all its rounds and hosts.
        reason: Why there is a new one, for people.
    """

    number: int
    seats: tuple[Seat, ...]
    run: str
    reason: str = ""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(seat.num_ranks for seat in self.seats)

    def seat_of(self, host: str) -> Seat:
        """Of a host that takes part."""
        return next(seat for seat in self.seats if seat.host == host)

    def first_rank(self, host: str) -> int:
        """The global rank of a host's first."""
        names = [seat.host for seat in self.seats]
        return sum(seat.num_ranks for seat in self.seats[: names.index(host)])
