"""Threads that work beside training, where it has no core to spare."""

from __future__ import annotations

import os
import threading

NICE = 10
"""Of such threads. Where training wants all cores, one gets a tenth of one (Linux gives 110 shares to 1024)."""


def stand_back() -> None:
    """From now on this thread, and those that it starts, get a core when nobody else wants it, and little otherwise.

    What waits for such a thread leaves it a core, so it is then as fast as any. On Linux the value is a thread's own.
    """
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))
