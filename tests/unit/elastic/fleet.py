"""Hosts that do what a policy orders, on a clock of their own: what its tests are told with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.policy.actions import Action, EndRun, SetAside, StartRound, StopRound
from lightning_dist.elastic.policy.events import (
    Cause,
    Event,
    FirstStep,
    HostLost,
    HostReady,
    RoundDone,
    RoundStopped,
    Snapshot,
    Tick,
    WorkerFailed,
)
from lightning_dist.elastic.policy.machine import Policy
from lightning_dist.elastic.policy.situation import Presence, State


class Fleet:
    """Agents that live obey at once, unless they are in ``deaf``; the log holds all that was ordered."""

    def __init__(self, mode: str = "degrade", *, hosts: tuple[int, int] = (1, 4), **more: Any) -> None:
        options = ElasticConfig(mode=mode, **more.pop("options", {}))
        self.policy = Policy(options, min_hosts=hosts[0], max_hosts=hosts[1], host="a", **more)
        self.now_s = 0.0
        self.log: list[Action] = []
        self.deaf: set[str] = set()
        self.away: set[str] = set()
        self.leaving: set[str] = set()

    def tell(self, *events: Event) -> None:
        for event in events:
            for action in self.policy.react(event, self.now_s):
                self.log.append(action)
                self._obey(action)

    def _obey(self, action: Action) -> None:
        if isinstance(action, SetAside):
            self.away.add(action.host)
        if not isinstance(action, StopRound):
            return
        for host in self.policy.situation.members:
            if host in self.policy.situation.outstanding and host not in self.deaf | self.away:
                self.tell(RoundStopped(host, action.number))
        for host in self.policy.situation.members:
            is_idle = self.policy.situation.hosts[host].presence is Presence.BUSY and self.number == action.number
            if is_idle and host not in self.deaf | self.away | self.leaving:
                self.tell(HostReady(host, 2))

    def come(self, *hosts: str) -> None:
        self.away.difference_update(hosts)
        self.tell(*[HostReady(host, 2) for host in hosts])

    def lose(self, host: str, *, is_certain: bool = True) -> None:
        self.away.add(host)
        self.tell(HostLost(host, is_certain))

    def fail(self, host: str, cause: Cause = Cause.SIGNAL, **more: Any) -> None:
        more = {"rank": 0, "exit_code": -9, **more}
        self.tell(WorkerFailed(host, self.number, cause=cause, **more))

    def step(self) -> None:
        self.tell(*[FirstStep(host, self.number, 1) for host in self.members])

    def save(self, step: int = 5) -> None:
        self.tell(Snapshot(self.number, step))

    def finish(self, *hosts: str) -> None:
        self.tell(*[RoundDone(host, self.number) for host in hosts or self.members])

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.tell(Tick())

    @property
    def state(self) -> State:
        return self.policy.situation.state

    @property
    def number(self) -> int:
        return self.policy.situation.number

    @property
    def members(self) -> tuple[str, ...]:
        return self.policy.situation.members

    def said(self, kind: type[Action]) -> Sequence[Any]:
        return [action for action in self.log if isinstance(action, kind)]

    @property
    def end(self) -> EndRun:
        assert self.state is State.ENDED, self.state
        ends = self.said(EndRun)
        assert len(ends) == 1
        return ends[0]

    @property
    def start(self) -> StartRound:
        return self.said(StartRound)[-1]


def running(mode: str = "degrade", members: str = "abc", **more: Any) -> Fleet:
    """A fleet whose first round trains."""
    fleet = Fleet(mode, **more)
    fleet.come(*members)
    fleet.wait(fleet.policy.situation.terms.waits.join_s)
    assert fleet.members == tuple(members)
    fleet.step()
    assert fleet.state is State.RUNNING
    return fleet
