"""What this host's agent is to do next: what the leader orders, and what signals to the agent mean.

The first SIGTERM or SIGUSR1 is a preemption: the leader hears that the host leaves, and has all ranks commit a snapshot
and stop. A second one ends at once, and so does SIGINT or SIGHUP. One that comes within a second is the first again:
launchers pass signals on that their children have got as well.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable
from signal import Signals as Signal
from typing import Protocol

from lightning_dist.elastic.agent.signals import PREEMPTION, Signals
from lightning_dist.elastic.policy.events import EndAsked, HostLeaves
from lightning_dist.elastic.session import End, Session, Stop

SAME_S = 1.0
TURN_S = 0.1  # how often the leader is asked


class HasDescriptor(Protocol):
    """Something to wait for."""

    def fileno(self) -> int:
        """Its descriptor; -1: there is nothing to wait for."""


class Orders:
    """Listens to the leader and to signals.

    Args:
        session: Leads to the leader.
        signals: To this process.
        host: This host's name.
        say: Tells people.
    """

    def __init__(self, session: Session, signals: Signals, *, host: str, say: Callable[[str], None]) -> None:
        self._session = session
        self._signals = signals
        self._host = host
        self._say = say
        self._own_end: End | None = None
        self._told_to_leave_s = -math.inf
        self.leaving: End | None = None
        """How this agent ends once its ranks have stopped: it was told to leave."""
        self.is_interrupted = False
        """Somebody has pressed Ctrl-C, or closed the terminal."""
        self._hurries = False

    def next(self, timeout_s: float = TURN_S, *others: HasDescriptor) -> Stop | End | None:
        """An order; ``None``: there is none within the time, or one of the others has something to say.

        Args:
            timeout_s: How long to wait, in seconds.
            others: Waiting ends when one of them can be read.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            order = self._now()
            left = deadline - time.monotonic()
            if order is not None or left <= 0:
                return order
            watched = [other for other in others if other.fileno() >= 0]
            ready = select.select([self._signals, *watched], [], [], min(left, TURN_S))[0]
            if any(one is not self._signals for one in ready):
                return self._now()

    def is_hurried(self) -> bool:
        """Whether somebody has sent a second signal: nothing is waited for any more."""
        self._now()
        return self._hurries

    def _now(self) -> Stop | End | None:
        for number in self._signals.take():
            self._hear(number)
        return self._own_end or self._session.order()

    def _hear(self, number: Signal) -> None:
        now_s = time.monotonic()
        if number in PREEMPTION and now_s - self._told_to_leave_s < SAME_S:
            return
        name = number.name
        end = End(128 + number, f"{name} received by the agent of host {self._host}")
        if number in PREEMPTION and self.leaving is None:
            self._say(f"{name}: this host leaves; its ranks stop at a snapshot (once more: at once)")
            self.leaving, self._told_to_leave_s = end, now_s
            self._session.tell(HostLeaves(self._host, detail=name))
            return
        self._say(f"{name}: all ranks end now")
        if number not in PREEMPTION:
            self._session.tell(EndAsked(detail=end.reason, exit_code=end.exit_code, at_snapshot=False))
        self.is_interrupted = self.is_interrupted or number not in PREEMPTION
        self._hurries = self._hurries or self._own_end is not None or number in PREEMPTION
        self._own_end = self._own_end or end
