"""A cap on bytes a second: a bucket that fills at the rate, and out of which what is sent is taken."""

from __future__ import annotations

import time
from collections.abc import Callable


class RateLimit:
    """Holds back who would send too much; for one thread.

    Args:
        bytes_per_s: The cap; ``None``: there is none.
        burst_s: What was not sent for so long may be sent at once, in seconds.
        clock: Seconds, from any start.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        bytes_per_s: float | None,
        *,
        burst_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst_s = burst_s
        self._clock = clock
        self._sleep = sleep
        self._free_at_s = clock() - burst_s  # when all that was sent has been paid for

    def take(self, size_bytes: int) -> None:
        """Wait until so many bytes may be sent."""
        if self._bytes_per_s is None:
            return
        now_s = self._clock()
        self._free_at_s = max(self._free_at_s, now_s - self._burst_s) + size_bytes / self._bytes_per_s
        if self._free_at_s > now_s:
            self._sleep(self._free_at_s - now_s)
