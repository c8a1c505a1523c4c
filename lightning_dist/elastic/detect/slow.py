"""Which hosts and ranks are slower than the others, by the time in which they wait for nobody; pure.

All ranks take equally long for a step, since they wait for the slowest. What tells it from the others is that it does
not wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

LOOKS = 5
"""So many looks in a row must agree, to call somebody slow and to call it well again."""
LEAST_S = 0.02
"""Less than so many seconds a step is nobody's trouble."""


@dataclass(frozen=True)
class Slow:
    """A host, or one rank of it, that others wait for.

    Attributes:
        host: Its name.
        local_rank: Which of its ranks; ``None``: the host as a whole.
        own_s: Its own work, seconds a step.
        others_s: That of the others: the median.
    """

    host: str
    local_rank: int | None
    own_s: float
    others_s: float

    def __str__(self) -> str:
        who = f"host {self.host}" if self.local_rank is None else f"local rank {self.local_rank} on host {self.host}"
        times = f", {self.own_s / self.others_s:.1f} times as long" if self.others_s else ""
        return (
            f"{who} is slow: its own work takes {self.own_s:.3f} s a step, that of the others {self.others_s:.3f} s"
            f"{times}; they wait for it, training goes on"
        )


class SlowRanks:
    """Finds them; each once, until it has been well for a while.

    Args:
        factor: How many times as long as the others' is slow.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._streaks: dict[tuple[str, int | None], int] = {}
        self._named: set[tuple[str, int | None]] = set()

    def look(self, own_s: Mapping[str, Sequence[float]]) -> list[Slow]:
        """Who has turned out to be slow.

        Args:
            own_s: Seconds of the last step in which each rank waited for nobody, by host and local rank; ``nan`` where
                nobody knows. Ask once for each new step.
        """
        known = {host: {i: s for i, s in enumerate(times) if not math.isnan(s)} for host, times in own_s.items()}
        slow = {(each.host, each.local_rank): each for each in self._slow_now(known)}
        found = []
        for who in {*slow, *self._streaks, *self._named}:
            is_slow, was_named = who in slow, who in self._named
            streak = self._streaks.get(who, 0) + 1 if is_slow is not was_named else 0
            self._streaks[who] = streak
            if streak >= LOOKS:
                self._streaks.pop(who)
                self._named ^= {who}
                found += [slow[who]] if is_slow else []
            elif not streak:
                self._streaks.pop(who)
        return sorted(found, key=lambda each: (each.host, each.local_rank is not None, each.local_rank or 0))

    def _slow_now(self, known: Mapping[str, Mapping[int, float]]) -> Iterator[Slow]:
        for host, ranks in known.items():
            elsewhere = [s for other, times in known.items() if other != host for s in times.values()]
            if elsewhere and ranks and self._is_slow(median(ranks.values()), median(elsewhere)):
                yield Slow(host, None, median(ranks.values()), median(elsewhere))
                continue
            for local_rank, own_s in ranks.items():
                others = elsewhere + [s for other, s in ranks.items() if other != local_rank]
                if others and self._is_slow(own_s, median(others)):
                    yield Slow(host, local_rank, own_s, median(others))

    def _is_slow(self, own_s: float, others_s: float) -> bool:
        return own_s > self._factor * others_s and own_s - others_s > LEAST_S
