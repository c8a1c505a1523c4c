"""Compares how fast the hosts of a round are, by what their agents tell now and then."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.detect.slow import Slow, SlowRanks
from lightning_dist.elastic.policy.events import Event, OptionsTold, Progress


class Slowness:
    """Finds slow hosts and ranks of the present round; each once.

    Args:
        options: Until the script tells its own.
    """

    def __init__(self, options: ElasticConfig) -> None:
        self._factor = options.slow_factor
        self.begin(0)

    def begin(self, number: int) -> None:
        """A round begins."""
        self._round = number
        self._step = 0
        self._own_s: dict[str, tuple[float, ...]] = {}
        self._slow = SlowRanks(self._factor)

    def hear(self, event: Event) -> Sequence[Slow]:
        """Who has turned out to be slow."""
        if isinstance(event, OptionsTold) and event.options.slow_factor != self._factor:
            self._factor = event.options.slow_factor
            self._slow = SlowRanks(self._factor)
        if not isinstance(event, Progress) or event.round != self._round:
            return ()
        self._own_s[event.host] = event.own_s
        if event.step <= self._step:  # another host told of this step
            return ()
        self._step = event.step
        return self._slow.look(self._own_s)
