"""Which ranks still beat, judged by the clock of the one who looks; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

LEFT = -(1 << 62)
"""A rank that ends in order adds this to its count, which is below 0 from then on."""


class Silence(NamedTuple):
    """A rank that does not beat, or did not.

    Attributes:
        rank: Which.
        silent_s: For how long nothing was seen of it.
        is_over: Whether it beats again.
    """

    rank: int
    silent_s: float
    is_over: bool


@dataclass
class _Seen:
    count: int
    silent_s: float = 0.0
    is_late: bool = False


@dataclass
class BeatWatch:
    """Tells from counts that go up who has fallen silent and who is back.

    Clocks of other hosts do not matter: what counts is how long the one who looks has seen no change. Time in which
    nobody looked (the looking process was stopped itself, the store did not answer) counts for a third of the deadline
    at most, so that it takes three looks at least to find a rank late.

    Attributes:
        timeout_s: From when on a rank is late.
    """

    timeout_s: float
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _looked_s: float | None = None

    def look(self, counts: Mapping[int, int], now_s: float) -> list[Silence]:
        """Who has become late since the last look, and who is back.

        Args:
            counts: By rank, of those that have begun; others are not late yet.
            now_s: Monotonic clock.
        """
        passed_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, self.timeout_s / 3)
        self._looked_s = now_s
        return [change for rank, count in counts.items() for change in self._judged(rank, count, passed_s)]

    @property
    def late(self) -> list[int]:
        """Ranks that are late now."""
        return [rank for rank, seen in self._seen.items() if seen.is_late]

    def _judged(self, rank: int, count: int, passed_s: float) -> Iterable[Silence]:
        seen = self._seen.setdefault(rank, _Seen(count))
        if count < 0 or count != seen.count:
            was_late, silent_s = seen.is_late, seen.silent_s + passed_s
            self._seen[rank] = _Seen(count)
            if was_late:
                yield Silence(rank, silent_s, True)
            return
        seen.silent_s += passed_s
        if seen.silent_s > self.timeout_s and not seen.is_late:
            seen.is_late = True
            yield Silence(rank, seen.silent_s, False)
