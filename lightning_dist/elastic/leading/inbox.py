"""What came from the leader and waits for the agent, which looks from another thread."""

from __future__ import annotations

import threading
from collections import deque

from lightning_dist.elastic.rounds import Round
from lightning_dist.elastic.session import End, Stop


class Inbox:
    """Rounds and orders between the loop's thread and the agent's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._round: Round | None = None
        self._end: End | None = None
        self._orders: deque[Stop | End] = deque()

    def put_round(self, value: Round) -> None:
        """A round begins; one that nobody took is replaced."""
        with self._changed:
            self._round = value
            self._changed.notify_all()

    def withdraw(self, number: int) -> Round | None:
        """Take a round back; ``None``: the agent has it already."""
        with self._changed:
            if self._round is None or self._round.number != number:
                return None
            taken, self._round = self._round, None
            return taken

    def round_ended(self, number: int) -> None:
        """What was wanted of a round is done; orders to stop it that nobody took yet are void."""
        with self._changed:
            left = [order for order in self._orders if isinstance(order, End) or order.number > number]
            self._orders = deque(left)

    def put_order(self, order: Stop | End) -> None:
        """The leader wants something; after an end nothing else matters."""
        with self._changed:
            if self._end is not None:
                return
            if isinstance(order, End):
                self._end = order
            self._orders.append(order)
            self._changed.notify_all()

    def take_round(self, timeout_s: float) -> Round | End | None:
        """Wait for a round or the end; a round is given once."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None or self._round is not None, timeout_s)
            if self._end is not None:
                return self._end
            taken, self._round = self._round, None
            return taken

    def take_order(self) -> Stop | End | None:
        """The oldest order that was not taken yet."""
        with self._changed:
            return self._orders.popleft() if self._orders else None
