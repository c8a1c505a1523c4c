"""Which rank sits on which host in a test, and the variables a launcher would set for it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

HostRanks: TypeAlias = "Mapping[str, Sequence[int]] | Sequence[tuple[str, Sequence[int]] | list[object]]"


@dataclass(frozen=True)
class Seat:
    """Where one rank sits."""

    rank: int
    world_size: int
    host: str
    node_rank: int
    local_rank: int
    local_world_size: int
    num_hosts: int

    def environment(self) -> dict[str, str]:
        """What a launcher would tell this rank."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "NODE_RANK": str(self.node_rank),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.num_hosts),
        }


@dataclass(frozen=True)
class Placement:
    """Host name -> its ranks, in order of hosts."""

    hosts: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, given: Placement | HostRanks | int) -> Placement:
        """From a number of ranks (all on one host), a mapping ``{"a": [0, 1]}`` or pairs ``[["a", [0, 1]]]``.

        Raises:
            ValueError: The ranks are not 0..n-1, each once.
        """
        if isinstance(given, Placement):
            return given
        if isinstance(given, int):
            return cls((("localhost", tuple(range(given))),))
        pairs: Iterable[tuple[str, Sequence[int]]] = given.items() if isinstance(given, Mapping) else given  # type: ignore[assignment]
        placement = cls(tuple((str(host), tuple(ranks)) for host, ranks in pairs))
        ranks = sorted(rank for _, host_ranks in placement.hosts for rank in host_ranks)
        if not ranks or ranks != list(range(len(ranks))):
            raise ValueError(f"a placement holds each rank 0..n-1 once, got {placement.as_dict()}")
        return placement

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(len(ranks) for _, ranks in self.hosts)

    def as_dict(self) -> dict[str, list[int]]:
        """Host name -> its ranks."""
        return {host: list(ranks) for host, ranks in self.hosts}

    def seats(self) -> list[Seat]:
        """The seats, by rank."""
        seats = [
            Seat(rank, self.world_size, host, node_rank, local_rank, len(ranks), len(self.hosts))
            for node_rank, (host, ranks) in enumerate(self.hosts)
            for local_rank, rank in enumerate(ranks)
        ]
        return sorted(seats, key=lambda seat: seat.rank)


PLACEMENTS: dict[str, Placement] = {
    "1": Placement.of({"a": [0]}),
    "2": Placement.of({"a": [0, 1]}),
    "1+1": Placement.of({"a": [0], "b": [1]}),
    "2+2": Placement.of({"a": [0, 1], "b": [2, 3]}),
    "3+1": Placement.of({"a": [0, 1, 2], "b": [3]}),
    "cyclic": Placement.of({"a": [0, 2], "b": [1, 3]}),
    "4x2": Placement.of({"a": [0, 1], "b": [2, 3], "c": [4, 5], "d": [6, 7]}),
}
"""The layouts every synchronisation is tested in."""
