"""What an agent and the leader say to each other, as the agent sees it.

The agent runs the ranks of its host and knows nothing of other hosts; the leader decides. Where the leader is, and that
another one takes over when it is lost, is the session's business alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lightning_dist.elastic.policy.events import Event
from lightning_dist.elastic.rounds import Round


@dataclass(frozen=True)
class Stop:
    """End the ranks of a round.

    Attributes:
        number: Of the round.
        reason: For people, and for the ranks' last words.
        at_snapshot: Let them commit a snapshot first, at their next step.
    """

    number: int
    reason: str
    at_snapshot: bool = False


@dataclass(frozen=True)
class End:
    """End, whatever runs.

    Attributes:
        exit_code: The agent's.
        reason: For people.
    """

    exit_code: int
    reason: str


class Session(Protocol):
    """An agent's connection to whoever leads. Calls return at once unless they say how long they may wait.

    An agent's calls, in order: ``ready``, then ``next_round`` until there is one; ``tell`` while its ranks run, and
    ``order`` every tenth of a second; when the ranks have ended, ``tell(RoundStopped)`` or ``tell(RoundDone)``, and
    ``ready`` again. ``leave`` at the end.
    """

    def ready(self, num_ranks: int, store_port: int = 0) -> None:
        """Say that this host is checked, has no rank running, and waits for a round.

        Args:
            num_ranks: It would run so many.
            store_port: Where its store for the ranks of the next round is; 0: it has none.
        """

    def next_round(self, timeout_s: float) -> Round | End | None:
        """The round that begins, once this host is in one; ``None``: not yet."""

    def tell(self, event: Event) -> None:
        """Let the leader know. What was told before the leader was lost is told to the next one as well."""

    def told(self, timeout_s: float) -> bool:
        """Wait until there is a leader to whom all is told that :meth:`tell` was given, at most so many seconds."""

    def order(self) -> Stop | End | None:
        """What the leader wants by now; each order once."""

    def leave(self, reason: str) -> None:
        """This host ends, in order. Safe to call twice."""
