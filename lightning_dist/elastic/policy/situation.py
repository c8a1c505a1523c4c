"""All that the leader knows, as one value: the state, the hosts, the round, and what has failed."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.policy.blame import Blame, Failure
from lightning_dist.elastic.policy.quorum import Side
from lightning_dist.elastic.policy.sizes import Sizes


class State(enum.Enum):
    """Where a run is."""

    GATHERING = "gathering"  # hosts come; there was no round yet
    STARTING = "starting"  # ranks start; not all hosts have done the first step
    RUNNING = "running"
    DRAINING = "draining"  # ranks commit a snapshot, and end
    STOPPING = "stopping"  # ranks are ended
    WAITING = "waiting"  # no rank runs; hosts are waited for
    ENDED = "ended"


TRANSITIONS: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.GATHERING: frozenset({State.STARTING, State.ENDED}),
        State.STARTING: frozenset({State.RUNNING, State.STOPPING, State.ENDED}),
        State.RUNNING: frozenset({State.DRAINING, State.STOPPING, State.ENDED}),
        State.DRAINING: frozenset({State.STOPPING, State.WAITING, State.ENDED}),
        State.STOPPING: frozenset({State.WAITING, State.ENDED}),
        State.WAITING: frozenset({State.STARTING, State.ENDED}),
        State.ENDED: frozenset(),
    }
)
"""Which states may follow each."""

ACTIVE = frozenset({State.STARTING, State.RUNNING, State.DRAINING, State.STOPPING})
"""Ranks run, or may."""


class Presence(enum.Enum):
    """What is known of a host."""

    EXPECTED = "expected"  # an earlier leader knew it; this one has not heard it yet
    READY = "ready"  # it is checked, and waits for a round
    BUSY = "busy"  # it is there, and runs ranks, ends them, or checks itself
    UNHEALTHY = "unhealthy"  # it is there, and has failed its check
    SILENT = "silent"  # it is not heard any more; its ranks may live
    GONE = "gone"  # its agent has ended, and its ranks with it


_THERE = frozenset({Presence.READY, Presence.BUSY, Presence.UNHEALTHY})
LOST = frozenset({Presence.SILENT, Presence.GONE})


@dataclass(frozen=True)
class Host:
    """A host, as the leader knows it.

    Attributes:
        presence: Whether it is there.
        arrival: Hosts are numbered as they come.
        num_ranks: It runs so many.
        is_leaving: It was told to end.
        is_aside: It takes no part any more.
        failures_s: When rounds failed because of it.
    """

    presence: Presence
    arrival: int
    num_ranks: int = 0
    is_leaving: bool = False
    is_aside: bool = False
    failures_s: tuple[float, ...] = ()

    @property
    def is_eligible(self) -> bool:
        """It may take part, once it is ready."""
        return not (self.is_leaving or self.is_aside)


@dataclass(frozen=True)
class Waits:
    """How long is waited for hosts, in seconds. What the script chooses is in ``ElasticConfig``.

    Attributes:
        gather_s: Until enough hosts are there for the first round; then the run ends.
        join_s: For more than the fewest, before the first round.
        stop_s: For a host to end its ranks; then it counts as silent.
        ready_s: For a host whose ranks have ended to be ready again.
        patience_s: For hosts without which nothing can go on, at least; then the run ends.
        fence_s: For a larger side, before a smaller one asks for the fence; half of the hosts ask at once.
        snapshot_s: For a snapshot, before a round is stopped for a host that is back without one.
    """

    gather_s: float = 600.0
    join_s: float = 30.0
    stop_s: float = 60.0
    ready_s: float = 60.0
    patience_s: float = 60.0
    fence_s: float = 2.0
    snapshot_s: float = 30.0


@dataclass(frozen=True)
class Terms:
    """What does not change while a leader leads.

    Attributes:
        min_hosts: No round has fewer.
        max_hosts: No round has more.
        host: The leader's own.
        leads_by_right: It is at the first endpoint, so that it may start the first round.
        has_fence: Rounds are claimed on shared storage.
        waits: How long is waited for hosts.
    """

    min_hosts: int
    max_hosts: int
    host: str
    leads_by_right: bool = True
    has_fence: bool = False
    waits: Waits = field(default_factory=Waits)


@dataclass(frozen=True)
class LastRound:
    """What a leader that takes over knows of the last round.

    Attributes:
        number: From 1.
        hosts: By node rank.
        leader: The host that led it.
        is_running: Its ranks may be running; else they have ended.
        num_ranks: Of each host; empty: not known.
    """

    number: int
    hosts: tuple[str, ...]
    leader: str | None
    is_running: bool = True
    num_ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Progress:
    """How far a round has come.

    Attributes:
        started_s: When it was ordered; that of a round of another leader is long ago.
        stepped: Hosts whose ranks have all done the first step.
        done: Hosts whose ranks have all ended well.
        stopped: Hosts whose ranks were ended.
        left: Hosts that were told to end.
        failures: In the order in which they were heard of.
        snapshot_step: Of the newest snapshot committed in this round.
    """

    started_s: float = -math.inf
    stepped: frozenset[str] = frozenset()
    done: frozenset[str] = frozenset()
    stopped: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    failures: tuple[Failure, ...] = ()
    snapshot_step: int | None = None


@dataclass(frozen=True)
class Ending:
    """Somebody wants the run to end.

    Attributes:
        exit_code: Of the run.
        reason: For people.
        at_snapshot: After a snapshot, if one can be made.
        is_urgent: It was said twice.
    """

    exit_code: int
    reason: str
    at_snapshot: bool = True
    is_urgent: bool = False


@dataclass(frozen=True)
class Situation:
    """All that the leader knows.

    Attributes:
        options: The script's.
        terms: The launcher's.
        sizes: Which rounds the script's layout fits.
        state: Where the run is.
        since_s: Since when.
        hosts: All that were ever heard of, by name.
        number: Of the last round; 0: there was none.
        members: Its hosts, by node rank.
        leader: The host that led it.
        progress: How far it has come.
        reason: Why it was stopped, for people.
        blame: What it has failed of.
        restarts_s: When rounds have failed.
        fruitless: So many rounds in a row have failed at once, before their first step, all of ``fruitless_error``.
        fruitless_error: See above.
        has_said_misfit: It has told people that the hosts that are ready make no round that fits.
        enough_s: Since when there are enough hosts; ``None``: there are not.
        ending: Somebody wants the run to end.
    """

    options: ElasticConfig
    terms: Terms
    sizes: Sizes = field(default_factory=Sizes)
    state: State = State.GATHERING
    since_s: float = 0.0
    hosts: Mapping[str, Host] = field(default_factory=dict)
    number: int = 0
    members: tuple[str, ...] = ()
    leader: str | None = None
    progress: Progress = field(default_factory=Progress)
    reason: str = ""
    blame: Blame | None = None
    restarts_s: tuple[float, ...] = ()
    fruitless: int = 0
    fruitless_error: str = ""
    has_said_misfit: bool = False
    enough_s: float | None = None
    ending: Ending | None = None

    @property
    def is_active(self) -> bool:
        """Ranks run, or may."""
        return self.state in ACTIVE

    @property
    def floor(self) -> int:
        """So many hosts are needed for the next round."""
        if self.options.mode == "degrade" or not self.members:
            return self.terms.min_hosts
        return len(self.members)

    @property
    def ceiling(self) -> int:
        """The next round has no more hosts than that."""
        if self.options.mode == "degrade" or not self.members:
            return self.terms.max_hosts
        return len(self.members)

    @property
    def candidates(self) -> tuple[str, ...]:
        """Hosts that are ready for the next round: those of the last one in their order, then by arrival."""
        ready = [name for name, host in self.hosts.items() if host.is_eligible and host.presence is Presence.READY]
        places = {name: place for place, name in enumerate(self.members)}
        return tuple(sorted(ready, key=lambda name: (places.get(name, len(places)), self.hosts[name].arrival)))

    def seating(self, hosts: Iterable[str]) -> tuple[str, ...]:
        """Those of the hosts that make the largest round; none if the script's layout fits no part of them."""
        return self.sizes.seat(self.ranks_of(hosts), self.ceiling)

    def ranks_of(self, hosts: Iterable[str]) -> dict[str, int]:
        """How many ranks each host runs."""
        return {name: self.hosts[name].num_ranks for name in hosts}

    @property
    def spares(self) -> tuple[str, ...]:
        """Hosts that are ready, and no part of the round."""
        return tuple(name for name in self.candidates if name not in self.members)

    @property
    def coming(self) -> tuple[str, ...]:
        """Hosts of the last round that are about to be ready."""
        about = (Presence.BUSY, Presence.EXPECTED)
        return tuple(
            name for name in self.members if self.hosts[name].is_eligible and self.hosts[name].presence in about
        )

    @property
    def missed(self) -> tuple[str, ...]:
        """Hosts of the last round that are lost, or unwell, and might come back."""
        away = (Presence.SILENT, Presence.GONE, Presence.UNHEALTHY)
        return tuple(
            name
            for name in self.members
            if self.hosts[name].is_eligible and self.hosts[name].presence in away and name not in self.progress.left
        )

    @property
    def usable(self) -> tuple[str, ...]:
        """Hosts that are there and may take part now or soon."""
        there = (Presence.READY, Presence.BUSY)
        return tuple(name for name, host in self.hosts.items() if host.is_eligible and host.presence in there)

    @property
    def outstanding(self) -> tuple[str, ...]:
        """Hosts of the round whose ranks may be running."""
        over = self.progress.done | self.progress.stopped
        ended = (Presence.READY, Presence.SILENT, Presence.GONE)
        return tuple(name for name in self.members if name not in over and self.hosts[name].presence not in ended)

    @property
    def side(self) -> Side:
        """The hosts on this side, should there be a cut."""
        leads = self.leader == self.terms.host or (self.leader in self.hosts and self.is_there(self.leader))
        return Side(
            last=self.members,
            present=tuple(name for name in self.hosts if self.is_there(name)),
            dead=tuple(name for name, host in self.hosts.items() if host.presence is Presence.GONE),
            has_leader=leads if self.members else self.terms.leads_by_right,
            max_hosts=self.terms.max_hosts,
        )

    def is_there(self, name: str | None) -> bool:
        """A host hears this leader."""
        return name is not None and name in self.hosts and self.hosts[name].presence in _THERE

    def with_host(self, name: str, host: Host) -> Situation:
        """The same, but for one host."""
        return replace(self, hosts={**self.hosts, name: host})

    def recent(self, times_s: tuple[float, ...], now_s: float) -> tuple[float, ...]:
        """Those of the times that are within the window."""
        return tuple(time_s for time_s in times_s if now_s - time_s < self.options.window_s)
