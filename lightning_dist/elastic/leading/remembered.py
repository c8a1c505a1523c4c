"""What an agent has told its leader and heard from it, as far as the next leader needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_dist.elastic.leading.messages import Hello
from lightning_dist.elastic.policy.events import (
    Event,
    HostReady,
    OptionsTold,
    Progress,
    RoundDone,
    RoundStopped,
    SizesTold,
    Snapshot,
)
from lightning_dist.elastic.rounds import Round


@dataclass
class Remembered:
    """A member's side of the run.

    Attributes:
        host: This one.
        address: Under which others reach it.
        instance: Tells this process from another one of the same host.
        run: The run's name, once it is known or if it was given.
        term: Of the newest leader.
        leader: The host of the newest leader.
        lost: The leader that was lost last, and whether it is known to be dead.
        lost_s: When that was, on the monotonic clock; ``None``: there is another one by now.
        round: The newest round this host was in, or has heard of.
        starter: The host that led when that round began; ``None``: not known.
        is_running: Its ranks of that round have not ended.
        has_stopped: They were ended before their time.
        ready: That this host waits for a round.
        memory: The last that a leader wanted the next one to know.
        serial: Of the last event that was told.
    """

    host: str
    address: str
    instance: str
    run: str | None = None
    term: int = 0
    leader: str | None = None
    lost: tuple[str, bool] | None = None
    lost_s: float | None = None
    round: Round | None = None
    starter: str | None = None
    is_running: bool = False
    has_stopped: bool = False
    ready: HostReady | None = None
    memory: Mapping[str, Any] = field(default_factory=dict)
    serial: int = 0
    _told: list[tuple[int, Event]] = field(default_factory=list)

    def began(self, value: Round) -> None:
        """This host is in a round; what was told of earlier ones is old news."""
        if self.round is None or value.number != self.round.number:  # else another leader tells of it again
            self.starter = self.leader
        self.round, self.run, self.ready = value, value.run, None
        self.is_running, self.has_stopped = True, False
        self._keep(lambda event: isinstance(event, OptionsTold | SizesTold))

    def heard_of(self, value: Round, *, has_stopped: bool = False) -> None:
        """There is, or was, a newer round, without this host."""
        self.round, self.starter, self.is_running, self.has_stopped = value, None, False, has_stopped

    def told(self, event: Event) -> int:
        """The agent has told something; its serial number."""
        self.serial += 1
        if isinstance(event, HostReady):
            self.ready = event
        elif not isinstance(event, Progress):
            if isinstance(event, Snapshot | OptionsTold | SizesTold):  # the newest says it all
                self._keep(lambda old: type(old) is not type(event))
            if isinstance(event, RoundStopped | RoundDone) and self.round and event.round == self.round.number:
                self.is_running, self.has_stopped = False, isinstance(event, RoundStopped)
            self._told.append((self.serial, event))
        return self.serial

    def hello(self) -> Hello:
        """What the next leader is told first."""
        return Hello(
            self.host,
            self.address,
            self.instance,
            term=self.term,
            run=self.run,
            round=self.round,
            is_running=self.is_running,
            ready=self.ready,
            told=tuple(self._told),
            memory=self.memory,
            lost=self.lost,
        )

    def _keep(self, is_kept: Callable[[Event], bool]) -> None:
        self._told = [(serial, event) for serial, event in self._told if is_kept(event)]
