"""What an agent has told its leader and heard from it, as far as the next leader needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_dist.elastic.leading.messages import Hello
from lightning_dist.elastic.policy.events import (
    Event,
    HostReady,
    OptionsTold,
    RoundDone,
    RoundStopped,
    Snapshot,
    Tick,
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
        round: The newest round this host was in.
        is_running: Its ranks of that round have not ended.
        ready: The number of ranks of a host that waits for a round.
        memory: The last that a leader wanted the next one to know.
    """

    host: str
    address: str
    instance: str
    run: str | None = None
    term: int = 0
    leader: str | None = None
    lost: tuple[str, bool] | None = None
    round: Round | None = None
    is_running: bool = False
    ready: int | None = None
    memory: Mapping[str, Any] = field(default_factory=dict)
    _told: list[Event] = field(default_factory=list)
    _options: OptionsTold | None = None

    def began(self, value: Round) -> None:
        """This host is in a round; what was told of earlier ones is old news."""
        self.round, self.run, self.is_running, self.ready = value, value.run, True, None
        self._told.clear()

    def told(self, event: Event) -> None:
        """The agent has told something."""
        if isinstance(event, HostReady):
            self.ready = event.num_ranks
        elif isinstance(event, OptionsTold):
            self._options = event
        elif not isinstance(event, Tick):
            if isinstance(event, Snapshot):  # the newest says it all
                self._told = [old for old in self._told if not isinstance(old, Snapshot)]
            if isinstance(event, RoundStopped | RoundDone) and self.round and event.round == self.round.number:
                self.is_running = False
            self._told.append(event)

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
            told=(*(() if self._options is None else (self._options,)), *self._told),
            memory=self.memory,
            lost=self.lost,
        )
