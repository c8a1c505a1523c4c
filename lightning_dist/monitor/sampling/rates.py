"""From counts to rates; pure."""

from __future__ import annotations

from collections.abc import Mapping


class Rates:
    """What counters gained a second since they were last looked at.

    A counter that went back (its process or interface is another one now) has no rate until the next time, and neither
    has one that was not there before.
    """

    def __init__(self) -> None:
        self._counts: Mapping[str, float] = {}
        self._at_ns = 0

    def of(self, counts: Mapping[str, float], now_ns: int) -> dict[str, float]:
        """Gains a second, by name.

        Args:
            counts: As they are now.
            now_ns: Monotonic clock.
        """
        before, elapsed_s = self._counts, (now_ns - self._at_ns) / 1e9
        self._counts, self._at_ns = dict(counts), now_ns
        if elapsed_s <= 0:
            return {}
        return {
            name: (count - before[name]) / elapsed_s
            for name, count in counts.items()
            if name in before and count >= before[name]
        }
