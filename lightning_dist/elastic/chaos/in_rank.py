"""What a rank does to itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from lightning_dist.elastic.chaos.plan import Fault
from lightning_dist.errors import InjectedFaultError

_PIECE_BYTES = 1 << 20
_MOST_BYTES = 1 << 30

Act = Callable[[Fault], None]


def kill(fault: Fault) -> None:
    """See the table of kinds."""
    del fault
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error(fault: Fault) -> None:
    """See the table of kinds."""
    raise InjectedFaultError(f"rank {fault.rank} fails on purpose at step {fault.step}, as its plan of faults says")


def exit_at_once(fault: Fault) -> None:
    """See the table of kinds; nothing is tidied up."""
    os._exit(fault.options["code"])


def send_signal(fault: Fault) -> None:
    """See the table of kinds."""
    os.kill(os.getpid(), signal.Signals[fault.options["signal"]])


def use_memory(fault: Fault) -> None:
    """Until the kernel ends it: the conductor has bounded what this process may have."""
    pieces = [b"\1" * _PIECE_BYTES for _ in range(_MOST_BYTES // _PIECE_BYTES)]
    raise InjectedFaultError(f"rank {fault.rank} has got {len(pieces)} MiB beyond its bound, and lives")


ACTS: dict[str, Act] = {
    "kill": kill,
    "exception": raise_error,
    "exit": exit_at_once,
    "signal": send_signal,
}
"""By kind; what acts on checkpoints is handed in, see :class:`~lightning_dist.elastic.chaos.injector.Injector`."""

AFTER_ANSWER: dict[str, Act] = {"oom": use_memory}
"""What a rank does once the conductor has done its part."""
