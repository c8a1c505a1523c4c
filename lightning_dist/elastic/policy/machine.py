"""The policy: hears events, says what is to be done. All it knows is one value, and all it does follows from that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from lightning_dist.config.checks import check_count
from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.policy.actions import Action
from lightning_dist.elastic.policy.events import Event
from lightning_dist.elastic.policy.facts import note
from lightning_dist.elastic.policy.rules import settle
from lightning_dist.elastic.policy.situation import (
    Ending,
    Host,
    LastRound,
    Presence,
    Progress,
    Situation,
    State,
    Terms,
    Waits,
)
from lightning_dist.errors import ConfigError


class Policy:
    """What is done when ranks or hosts fail, leave or come back.

    It is a state machine: :data:`~lightning_dist.elastic.policy.situation.TRANSITIONS` lists what may follow what. It
    has no clock: a :class:`~lightning_dist.elastic.policy.events.Tick` several times a second lets its waits end.

    Args:
        options: The script's, until it tells others.
        min_hosts: No round has fewer.
        max_hosts: No round has more.
        host: Of the leader.
        leads_by_right: The leader is at the first endpoint.
        has_fence: The leader claims each round on shared storage before it starts it; one that does not get the claim
            stands down, and throws its policy away.
        last: The last round, for a leader that takes over. For each of its hosts that does not come,
            :class:`~lightning_dist.elastic.policy.events.HostLost` must be told, the former leader's first.
        memory: What the former leader's :meth:`memory` gave.
        now_s: The time.
        waits: How long is waited for hosts.

    Raises:
        ConfigError: Not 1 <= ``min_hosts`` <= ``max_hosts``.
    """

    def __init__(
        self,
        options: ElasticConfig,
        *,
        min_hosts: int,
        max_hosts: int,
        host: str,
        leads_by_right: bool = True,
        has_fence: bool = False,
        last: LastRound | None = None,
        memory: Mapping[str, Any] | None = None,
        now_s: float = 0.0,
        waits: Waits | None = None,
    ) -> None:
        check_count("MIN of --hosts MIN:MAX", min_hosts, low=1, unit="hosts")
        check_count("MAX of --hosts MIN:MAX", max_hosts, low=1, unit="hosts")
        if min_hosts > max_hosts:
            raise ConfigError(f"--hosts {min_hosts}:{max_hosts} has a MIN above its MAX; write {max_hosts}:{min_hosts}")
        terms = Terms(min_hosts, max_hosts, host, leads_by_right, has_fence, waits or Waits())
        self._situation = _inherited(Situation(options, terms, since_s=now_s), last, memory or {}, now_s)

    @property
    def situation(self) -> Situation:
        """All that is known now."""
        return self._situation

    def react(self, event: Event, now_s: float) -> list[Action]:
        """What is to be done about an event, in this order.

        Args:
            event: What the leader has heard.
            now_s: The time on a clock that only goes forward; the same one in all calls.
        """
        if self._situation.state is State.ENDED:
            return []
        move = settle(note(self._situation, event, now_s), now_s)
        self._situation = move.situation
        return list(move.actions)

    def memory(self, now_s: float) -> dict[str, Any]:
        """What the next leader's policy must know and is not told again: plain values, with ages instead of times."""
        situation = self._situation
        return {
            "restart_ages_s": [now_s - time_s for time_s in situation.recent(situation.restarts_s, now_s)],
            "failure_ages_s": {
                name: [now_s - time_s for time_s in situation.recent(host.failures_s, now_s)]
                for name, host in situation.hosts.items()
                if host.failures_s
            },
            "aside": sorted(name for name, host in situation.hosts.items() if host.is_aside),
            "left": sorted(situation.progress.left & set(situation.members)),
            "ending": None if situation.ending is None else asdict(situation.ending),
        }


def _inherited(situation: Situation, last: LastRound | None, memory: Mapping[str, Any], now_s: float) -> Situation:
    failures = {name: _times(ages, now_s) for name, ages in memory.get("failure_ages_s", {}).items()}
    aside = set(memory.get("aside", ()))
    members = last.hosts if last is not None else ()
    names = dict.fromkeys([*members, *failures, *sorted(aside)])
    ranks = dict(zip(members, last.num_ranks, strict=False)) if last is not None else {}
    hosts = {
        name: Host(
            Presence.EXPECTED, arrival, num_ranks=ranks.get(name, 0), is_aside=name in aside,
            failures_s=failures.get(name, ()),
        )
        for arrival, name in enumerate(names)
    }  # fmt: skip
    situation = replace(situation, hosts=hosts, restarts_s=_times(memory.get("restart_ages_s", ()), now_s))
    ending = memory.get("ending")
    situation = replace(situation, ending=None if ending is None else Ending(**ending))
    if last is None:
        return situation
    # Who leaves and lives says so again; of the former leader's host nothing more is heard.
    left = frozenset(memory.get("left", ())) & set(members)
    state = State.RUNNING if last.is_running else State.WAITING if members else State.GATHERING
    reason = "" if last.is_running else "another host leads"
    return replace(
        situation, state=state, number=last.number, members=members, leader=last.leader, reason=reason,
        progress=Progress(left=left),
    )  # fmt: skip


def _times(ages_s: Any, now_s: float) -> tuple[float, ...]:
    return tuple(now_s - float(age_s) for age_s in ages_s)
