"""What a leader begins with."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.leading import announce
from lightning_dist.elastic.leading.channel import Pace
from lightning_dist.elastic.leading.fence import Fence
from lightning_dist.elastic.leading.line_writer import LineWriter
from lightning_dist.elastic.leading.recorder import Recorder
from lightning_dist.elastic.policy.actions import Action
from lightning_dist.elastic.policy.events import Event
from lightning_dist.elastic.rounds import Round
from lightning_dist.incidents import Incident, to_line


class Reactor(Protocol):
    """The policy, as the leader sees it."""

    def react(self, event: Event, now_s: float) -> list[Action]:
        """What is to be done about an event."""

    def memory(self, now_s: float) -> Mapping[str, Any]:
        """What the next leader's policy is to know, as JSON."""


@dataclass(frozen=True)
class Duties:
    """Who leads, and with what.

    Attributes:
        host: The leader's host.
        instance: Tells this process from another one of the same host.
        term: The number of this leader, from 1.
        run: The run's name.
        pace: Of the members' connections.
        say: Tells people.
        options: Until the script tells its own.
        last_round: The newest round there was; its hosts are awaited.
        is_running: Its ranks may be running; else they have ended, or are to end.
        lost: The leader before this one, and whether it is known to be dead.
        lost_s: When this host lost it, on the clock; ``None``: another one has led since.
        fence: Where rounds are claimed; ``None``: nowhere.
        recorder: Makes incidents of what happens; ``None``: nobody does.
        lines: Writes them down; ``None``: nobody does.
        clock: Seconds, from any start.
    """

    host: str
    instance: str
    term: int
    run: str
    pace: Pace
    say: Callable[[str], None]
    options: ElasticConfig
    last_round: Round | None = None
    is_running: bool = False
    lost: tuple[str, bool] | None = None
    lost_s: float | None = None
    fence: Fence | None = None
    recorder: Recorder | None = None
    lines: LineWriter | None = None
    clock: Callable[[], float] = time.monotonic

    def record(self, incident: Incident | None) -> None:
        """Write an incident down, if it is one, and say that it is over."""
        if incident is None:
            return
        over = announce.going_on(incident)
        if over is not None:
            self.say(over)
        if self.lines is not None:
            self.lines.put(to_line(incident))
