"""Hosts, switches and links as values.

A :class:`Cluster` says on which host each rank sits, which switch each host hangs on (if that is known) and how fast
the links of each tier are (if they were measured). Nothing here reads the environment or talks to another rank.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_dist.errors import TopologyError

ORDERS = ("contiguous", "cyclic")


@functools.total_ordering
class Tier(enum.Enum):
    """How far a message travels; ordered from near to far, so that ``max`` of some tiers is the slowest.

    ``WORLD`` lies between hosts when no switches are known, and between switches when they are.
    """

    HOST = "host"
    SWITCH = "switch"
    WORLD = "world"

    @property
    def depth(self) -> int:
        """0 inside a host, 1 under a switch, 2 beyond."""
        return _DEPTHS[self]

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Tier):
            return NotImplemented
        return self.depth < other.depth


_DEPTHS = {tier: depth for depth, tier in enumerate(Tier)}


@dataclass(frozen=True)
class Link:
    """What one pair of ranks sees of a tier; ``None`` where it is not known.

    Attributes:
        bandwidth_bytes_per_s: Bytes a second in one direction.
        latency_s: Seconds one small message takes, one way.
    """

    bandwidth_bytes_per_s: float | None = None
    latency_s: float | None = None

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_per_s is not None and not self.bandwidth_bytes_per_s > 0:
            raise TopologyError(f"bandwidth_bytes_per_s must be positive, got {self.bandwidth_bytes_per_s}")
        if self.latency_s is not None and not self.latency_s >= 0:
            raise TopologyError(f"latency_s must not be negative, got {self.latency_s}")


@dataclass(frozen=True)
class Cluster:
    """Which host each rank sits on. Any placement is legal: contiguous, cyclic, uneven, one host, one rank.

    Hosts and switches are numbered by the first rank they hold.

    Attributes:
        host_of_rank: Name of the host of rank 0, 1, 2, ...
        switch_of_host: Host name -> switch name, for all hosts; empty if no switches are known.
        links: What is known of the links of each tier; may be empty.

    Raises:
        TopologyError: There is no rank, a name is empty, or switches are known for other hosts than those with ranks.
    """

    host_of_rank: tuple[str, ...]
    switch_of_host: Mapping[str, str] = field(default_factory=dict, hash=False)
    links: Mapping[Tier, Link] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "host_of_rank", tuple(self.host_of_rank))
        object.__setattr__(self, "switch_of_host", dict(self.switch_of_host))
        object.__setattr__(self, "links", dict(self.links))
        if not self.host_of_rank:
            raise TopologyError("a cluster has at least one rank, got none")
        if not all(isinstance(host, str) and host for host in self._ranks):
            raise TopologyError(f"host names are non-empty strings, got {list(self._ranks)}")
        if self.switch_of_host:
            unknown = sorted(set(self.switch_of_host) - set(self._ranks))
            if unknown:
                raise TopologyError(
                    f"switches name hosts that hold no rank: {_some(unknown)}; hosts are: {_some(self.hosts)}"
                )
            missing = [host for host in self.hosts if host not in self.switch_of_host]
            if missing:
                raise TopologyError(
                    f"no switch is given for host {_some(missing)}; name one for each host, or for none"
                )
            if not all(isinstance(switch, str) and switch for switch in self.switch_of_host.values()):
                raise TopologyError("switch names are non-empty strings")

    # -- making one ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_hosts(
        cls,
        hosts: Mapping[str, Iterable[int]],
        *,
        switches: Mapping[str, Iterable[str]] | None = None,
        links: Mapping[Tier, Link] | None = None,
    ) -> Cluster:
        """A cluster from host name -> its ranks, and switch name -> its hosts.

        Raises:
            TopologyError: A rank is on two hosts, missing or no rank; a host has no rank, is under two switches,
                under none, or unknown.
        """
        host_by_rank: dict[int, str] = {}
        for host, ranks in hosts.items():
            listed = list(ranks)
            if not listed:
                raise TopologyError(f"host {host!r} holds no rank; leave it out")
            for rank in listed:
                if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
                    raise TopologyError(f"host {host!r} lists {rank!r}; ranks are the integers 0, 1, 2, ...")
                if rank in host_by_rank:
                    raise TopologyError(f"rank {rank} is listed twice: on {host_by_rank[rank]!r} and on {host!r}")
                host_by_rank[rank] = str(host)
        size = len(host_by_rank)
        missing = [rank for rank in range(size) if rank not in host_by_rank]
        if missing:
            extra = sorted(rank for rank in host_by_rank if rank >= size)
            raise TopologyError(
                f"{size} ranks are listed, so they must be 0 to {size - 1}; missing: {_some(missing)}, "
                f"out of range: {_some(extra)}"
            )
        switch_of_host: dict[str, str] = {}
        for switch, members in (switches or {}).items():
            for host in members:
                if switch_of_host.setdefault(str(host), str(switch)) != str(switch):
                    raise TopologyError(
                        f"host {host!r} is under two switches: {switch_of_host[str(host)]!r} and {switch!r}"
                    )
        return cls(tuple(host_by_rank[rank] for rank in range(size)), switch_of_host, links or {})

    @classmethod
    def uniform(cls, num_hosts: int, ranks_per_host: int, *, order: str = "contiguous") -> Cluster:
        """``num_hosts`` hosts named ``host0``, ``host1``, ... of ``ranks_per_host`` ranks each.

        Args:
            num_hosts: Number of hosts.
            ranks_per_host: Ranks on each.
            order: ``contiguous`` (host 0 holds the first ranks) or ``cyclic`` (ranks are dealt to the hosts in turn).
        """
        if num_hosts < 1 or ranks_per_host < 1:
            raise TopologyError(f"a cluster has at least one host and one rank, got {num_hosts} x {ranks_per_host}")
        return cls(_deal([ranks_per_host] * num_hosts, order))

    @classmethod
    def parse(cls, notation: str) -> Cluster:
        """A cluster from a short notation.

        ``4`` is one host of 4 ranks; ``2x4`` two hosts of 4; ``3+1`` a host of 3 and one of 1; ``2x4+1x2`` two hosts of
        4 and one of 2; ``2x3x4`` two switches of 3 hosts of 4 ranks. A suffix ``:cyclic`` deals the ranks to the hosts
        in turn, ``:contiguous`` is the default.

        Raises:
            TopologyError: The notation is none of these.
        """
        shape, _, order = notation.strip().lower().partition(":")
        terms = [term.strip() for term in shape.split("+")]
        if not all(re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", term) for term in terms):
            raise TopologyError(
                f"cluster {notation!r} cannot be read; write e.g. 4 (one host of 4 ranks), 2x4 (two hosts of 4), "
                "3+1 (uneven hosts), 2x3x4 (two switches of 3 hosts of 4), each with or without :cyclic"
            )
        sizes: list[int] = []
        switch_of_host: dict[str, str] = {}
        num_switches = 0
        for term in terms:
            numbers = [int(number) for number in term.split("x")]
            switches, hosts, ranks = [1, 1, 1, *numbers][-3:]
            for _ in range(switches):
                if len(numbers) == 3:
                    names = (f"host{len(sizes) + i}" for i in range(hosts))
                    switch_of_host.update(dict.fromkeys(names, f"switch{num_switches}"))
                    num_switches += 1
                sizes.extend([ranks] * hosts)
        return cls(_deal(sizes, order or "contiguous"), switch_of_host)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cluster:
        """The reverse of :meth:`to_dict`."""
        try:
            links = {
                Tier(name): Link(link.get("bandwidth_bytes_per_s"), link.get("latency_s"))
                for name, link in (values.get("links") or {}).items()
            }
            return cls.from_hosts(values["hosts"], switches=values.get("switches"), links=links)
        except (KeyError, AttributeError, TypeError) as error:
            raise TopologyError(
                f"not a cluster: {error!r}; expected hosts, and optionally switches and links"
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold: ``hosts``, and ``switches`` and ``links`` where known."""
        values: dict[str, Any] = {"hosts": {host: list(ranks) for host, ranks in self._ranks.items()}}
        if self.switch_of_host:
            values["switches"] = {switch: list(self.hosts_of_switch(switch)) for switch in self.switches}
        if self.links:
            values["links"] = {
                tier.value: {"bandwidth_bytes_per_s": link.bandwidth_bytes_per_s, "latency_s": link.latency_s}
                for tier, link in self.links.items()
            }
        return values

    def flattened(self) -> Cluster:
        """The same ranks, each as a host of its own, without switches: a cluster with no hierarchy."""
        return Cluster(tuple(f"{host}/{self.rank_in_host(r)}" for r, host in enumerate(self.host_of_rank)))

    def without_switches(self) -> Cluster:
        """The same hosts with the third tier forgotten, and with it the links, whose tiers would mean another thing."""
        return Cluster(self.host_of_rank) if self.switch_of_host else self

    def restricted_to(self, ranks: Sequence[int]) -> Cluster:
        """The cluster of some ranks only, numbered 0, 1, ... in the given order, where they sit now.

        Raises:
            TopologyError: A rank is out of range.
        """
        hosts = tuple(self.host_of(rank) for rank in ranks)
        switches = {host: switch for host, switch in self.switch_of_host.items() if host in hosts}
        return Cluster(hosts, switches, self.links)

    def with_links(self, links: Mapping[Tier, Link]) -> Cluster:
        """The same cluster with other links."""
        return replace(self, links=links)

    # -- asking -------------------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.host_of_rank)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names, ordered by their first rank."""
        return tuple(self._ranks)

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return len(self._ranks)

    @property
    def ranks_per_host(self) -> tuple[int, ...]:
        """Number of ranks of each host, in the order of :attr:`hosts`."""
        return tuple(len(ranks) for ranks in self._ranks.values())

    @property
    def switches(self) -> tuple[str, ...]:
        """Switch names, ordered by their first rank; empty if none are known."""
        return tuple(self._hosts_of_switch)

    def ranks_of_host(self, host: str) -> tuple[int, ...]:
        """The ranks of a host, ascending."""
        if host not in self._ranks:
            raise TopologyError(f"host {host!r} is unknown; hosts are: {_some(self.hosts)}")
        return self._ranks[host]

    def hosts_of_switch(self, switch: str) -> tuple[str, ...]:
        """The hosts under a switch, ordered by their first rank."""
        if switch not in self._hosts_of_switch:
            raise TopologyError(f"switch {switch!r} is unknown; switches are: {_some(self.switches)}")
        return self._hosts_of_switch[switch]

    def host_of(self, rank: int) -> str:
        """Name of the host a rank sits on."""
        self._check_rank(rank)
        return self.host_of_rank[rank]

    def rank_in_host(self, rank: int) -> int:
        """Position of a rank among those of its host: 0, 1, ..."""
        self._check_rank(rank)
        return self._rank_in_host[rank]

    def switch_of(self, rank: int) -> str | None:
        """Name of the switch above a rank's host; ``None`` if no switches are known."""
        return self.switch_of_host.get(self.host_of(rank))

    def tier_of(self, ranks: Iterable[int]) -> Tier:
        """The slowest tier a group of ranks crosses; ``HOST`` for a single rank."""
        hosts = {self.host_of(rank) for rank in ranks}
        if len(hosts) <= 1:
            return Tier.HOST
        if self.switch_of_host and len({self.switch_of_host[host] for host in hosts}) == 1:
            return Tier.SWITCH
        return Tier.WORLD

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that separate at least two ranks, near to far."""
        found = []
        if max(self.ranks_per_host) > 1:
            found.append(Tier.HOST)
        if any(len(hosts) > 1 for hosts in self._hosts_of_switch.values()):
            found.append(Tier.SWITCH)
        if len(self.switches) > 1 or (not self.switches and self.num_hosts > 1):
            found.append(Tier.WORLD)
        return tuple(found)

    # -- tables, made once on first use -------------------------------------------------------------------------------

    @functools.cached_property
    def _ranks(self) -> dict[str, tuple[int, ...]]:
        lists: dict[str, list[int]] = {}
        for rank, host in enumerate(self.host_of_rank):
            lists.setdefault(host, []).append(rank)
        return {host: tuple(ranks) for host, ranks in lists.items()}

    @functools.cached_property
    def _rank_in_host(self) -> tuple[int, ...]:
        positions = [0] * self.world_size
        for ranks in self._ranks.values():
            for position, rank in enumerate(ranks):
                positions[rank] = position
        return tuple(positions)

    @functools.cached_property
    def _hosts_of_switch(self) -> dict[str, tuple[str, ...]]:
        lists: dict[str, list[str]] = {}
        if self.switch_of_host:
            for host in self.hosts:
                lists.setdefault(self.switch_of_host[host], []).append(host)
        return {switch: tuple(hosts) for switch, hosts in lists.items()}

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < len(self.host_of_rank):
            raise TopologyError(f"rank {rank} is out of range; ranks are 0 to {self.world_size - 1}")


def _deal(sizes: Sequence[int], order: str) -> tuple[str, ...]:
    """Host names by rank, for hosts of the given sizes."""
    if order == "contiguous":
        return tuple(f"host{host}" for host, size in enumerate(sizes) for _ in range(size))
    if order == "cyclic":
        return tuple(f"host{host}" for turn in range(max(sizes)) for host, size in enumerate(sizes) if turn < size)
    raise TopologyError(f"order {order!r} is unknown; allowed: {', '.join(ORDERS)}")


def _some(items: Sequence[object], limit: int = 8) -> str:
    """The items, or the first of them and how many more there are."""
    shown = ", ".join(str(item) for item in items[:limit]) or "none"
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"
