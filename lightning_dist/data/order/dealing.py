"""Who takes which samples of a step: replicas, from where they sit. Pure.

A step takes a run of numbers of the order. Each replica gets as many of them, and where the number of lanes allows it,
a host gets its own lanes only, so that a chunk is read by one host. Which replica computes a sample does not change the
set of a step.

Note [Units]
Replicas of a host are put into units of d, the greatest common divisor of the hosts' numbers of replicas: U = R / d
units. Where U divides L, number g goes to unit g mod U, and in it to member (g div U) mod d. So the replica follows
from g mod R, any run of R b numbers has b for each, and lane g mod L belongs to one unit, whose replicas share a host;
where R divides L, to one replica. Units of hosts take turns, so that a host's lanes are alike mod H where hosts have
equally many: these lie side by side in the data.

Note [Shared lanes]
If U does not divide L, hosts get lanes as evenly as lanes can be dealt. In each step, a host that has more samples in
its lanes than it may take leaves what is over, from the last of its lanes, to hosts that have less: numbers are exact,
but these lanes are read by two hosts or more.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_dist.config.checks import check_count
from lightning_dist.data.index.dataset_index import Numbers
from lightning_dist.errors import ConfigError


class SharedLanes(NamedTuple):
    """What lanes that do not fit the hosts cost.

    Attributes:
        hosts: Those that have fewer lanes than is their share, and so read those of others.
        write_lanes: A number of lanes near the present one with which no host would.
    """

    hosts: tuple[int, ...]
    write_lanes: int


@dataclass(frozen=True)
class Dealing:
    """How samples are dealt to replicas.

    Attributes:
        host_of_replica: Where each replica sits, as numbers of hosts in any order. A replica is all ranks that compute
            the same samples.
        lanes: Of the order.

    Raises:
        ConfigError: There is no replica.
    """

    host_of_replica: tuple[int, ...]
    lanes: int

    def __post_init__(self) -> None:
        check_count("lanes", self.lanes, low=1, unit="lanes")
        if not self.host_of_replica:
            raise ConfigError("samples are dealt to at least one replica, got none")

    @property
    def num_replicas(self) -> int:
        """How many."""
        return len(self.host_of_replica)

    def take(self, replica: int, start: int, stop: int) -> Numbers:
        """The numbers from ``start`` to ``stop`` - 1 that a replica takes, ascending.

        Replicas differ by at most one; by none if there are equally many for each.
        """
        if self._units is None:
            return self._by_hosts(replica, start, stop)
        residue = self._residues[replica]
        return np.arange(start + (residue - start) % self.num_replicas, stop, self.num_replicas, dtype=np.int64)

    def shared_lanes(self) -> SharedLanes | None:
        """Which hosts read lanes of others, and the ``lanes`` to write instead; ``None`` if none does."""
        if self._units is not None:
            return None
        given = Counter(self._owners.tolist())
        hosts = tuple(
            host
            for host, replicas in self._replicas_of.items()
            if given[host] * self.num_replicas < self.lanes * len(replicas)
        )
        return SharedLanes(hosts, -(-self.lanes // self._num_units) * self._num_units)

    @cached_property
    def _replicas_of(self) -> dict[int, list[int]]:
        """Replicas of each host; hosts by number."""
        found: dict[int, list[int]] = {host: [] for host in sorted(set(self.host_of_replica))}
        for replica, host in enumerate(self.host_of_replica):
            found[host].append(replica)
        return found

    @cached_property
    def _units(self) -> list[list[int]] | None:
        """Replicas of each unit, see Note [Units]; ``None`` if the lanes are not dealt to units."""
        return None if self.lanes % self._num_units else self._in_turn(self.num_replicas // self._num_units)

    @cached_property
    def _num_units(self) -> int:
        return self.num_replicas // math.gcd(*map(len, self._replicas_of.values()))

    def _in_turn(self, size: int) -> list[list[int]]:
        """Units of a size, one of each host, then the next of each host, ..."""
        units = [
            (place, host, replicas[place : place + size])
            for host, replicas in self._replicas_of.items()
            for place in range(0, len(replicas), size)
        ]
        return [replicas for _, _, replicas in sorted(units)]

    @cached_property
    def _residues(self) -> list[int]:
        """Which numbers mod R each replica takes."""
        assert self._units is not None
        residues = [0] * self.num_replicas
        for unit, replicas in enumerate(self._units):
            for member, replica in enumerate(replicas):
                residues[replica] = unit + len(self._units) * member
        return residues

    @cached_property
    def _owners(self) -> Numbers:
        """(lanes,) the host of each where hosts share lanes: that which is furthest behind its share."""
        hosts, sizes = list(self._replicas_of), np.array([len(found) for found in self._replicas_of.values()])
        behind, owners = np.zeros(len(hosts), dtype=np.int64), []
        for _ in range(self.lanes):
            behind += sizes
            furthest = int(np.argmax(behind))
            behind[furthest] -= self.num_replicas
            owners.append(hosts[furthest])
        return np.array(owners, dtype=np.int64)

    @cached_property
    def _host_major(self) -> _HostMajor:
        hosts = {host: index for index, host in enumerate(self._replicas_of)}
        owners = np.array([hosts[host] for host in self._owners.tolist()], dtype=np.int64)
        places = np.empty(self.lanes, dtype=np.int64)
        places[np.argsort(owners, kind="stable")] = np.arange(self.lanes)
        turns = np.empty(self.num_replicas, dtype=np.int64)
        turns[[replica for (replica,) in self._in_turn(1)]] = np.arange(self.num_replicas)
        replicas = np.array([replica for found in self._replicas_of.values() for replica in found], dtype=np.int64)
        sizes = np.array([len(found) for found in self._replicas_of.values()], dtype=np.int64)
        return _HostMajor(owners, places, replicas, np.repeat(np.arange(len(sizes)), sizes), turns)

    def _by_hosts(self, replica: int, start: int, stop: int) -> Numbers:
        """What a replica takes where hosts share lanes; see Note [Shared lanes]."""
        table, num_hosts = self._host_major, len(self._replicas_of)
        numbers = np.arange(start, stop, dtype=np.int64)
        numbers = numbers[np.argsort(table.places[numbers % self.lanes], kind="stable")]
        owners = table.owners[numbers % self.lanes]
        counts = np.bincount(owners, minlength=num_hosts)
        each, more = divmod(len(numbers), self.num_replicas)
        shares = each + (table.turns[table.replicas] < more)
        capacities = np.bincount(table.hosts, weights=shares, minlength=num_hosts).astype(np.int64)
        is_kept = np.arange(len(numbers)) - (np.cumsum(counts) - counts)[owners] < capacities[owners]
        takers = np.repeat(np.arange(num_hosts), capacities - np.minimum(counts, capacities))
        by_host = np.argsort(np.concatenate([owners[is_kept], takers]), kind="stable")
        dealt = np.concatenate([numbers[is_kept], numbers[~is_kept]])[by_host]
        place = int(np.flatnonzero(table.replicas == replica)[0])
        end = int(shares[: place + 1].sum())
        return np.sort(dealt[end - int(shares[place]) : end])


class _HostMajor(NamedTuple):
    """Lanes and replicas, host by host; hosts by their place among the hosts.

    Attributes:
        owners: (lanes,) the host of each lane.
        places: (lanes,) of each lane in a list of lanes by host.
        replicas: (replicas,) by host.
        hosts: (replicas,) the host of each of these.
        turns: (replicas,) which one a replica is if one of each host is taken in turn: who gets one sample more.
    """

    owners: Numbers
    places: Numbers
    replicas: Numbers
    hosts: Numbers
    turns: Numbers
