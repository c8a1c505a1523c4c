"""Processes of a ``DataLoader`` that go on for a while when a scheduler signals all processes of a job.

Its workers end at SIGTERM, and then the rank they read for ends with an error, before it could save. A rank that saves
before it stops needs them for a few more batches.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

GRACE_S = 60
"""How long a worker goes on after a signal, in seconds; a rank that ends takes its workers along long before."""

_Begin = Callable[[int], None]


class Patient:
    """What a worker does first: it heeds only the second SIGTERM at once. Can be sent to another process.

    Args:
        then: What else it does first.
    """

    def __init__(self, then: _Begin | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        """In the worker, once torch has set its own handlers."""
        signal.signal(signal.SIGTERM, _wait_for_the_end)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.SIG_IGN)
        if self._then is not None:
            self._then(worker)


def make_patient(loader: DataLoader[Any]) -> None:
    """Let a loader's workers, if it has any, outlive a scheduler's signal. A second time is the same."""
    if loader.num_workers and os.name == "posix" and not isinstance(loader.worker_init_fn, Patient):
        loader.worker_init_fn = Patient(loader.worker_init_fn)


def _wait_for_the_end(signum: int, frame: object) -> None:
    signal.signal(signum, signal.SIG_DFL)
    signal.alarm(GRACE_S)  # who stops a worker by a signal may wait for it
