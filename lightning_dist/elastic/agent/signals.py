"""Signals to the agent, taken note of and asked for in its loop: nothing is done inside a handler."""

from __future__ import annotations

import os
import signal
from types import TracebackType

PREEMPTION = (signal.SIGTERM, signal.SIGUSR1)
INTERRUPTION = (signal.SIGINT, signal.SIGHUP)


class Signals:
    """Takes note of signals from the start to the end of a ``with`` statement, in the main thread.

    SIGINT and SIGHUP stay ignored where they were: by ``nohup``, or in the background of a shell.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._former: dict[signal.Signals, object] = {}
        self._former_wakeup = -1

    def __enter__(self) -> Signals:
        self._former_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        ignored = [number for number in INTERRUPTION if signal.getsignal(number) is signal.SIG_IGN]
        for number in {*PREEMPTION, *INTERRUPTION} - {*ignored}:
            self._former[number] = signal.signal(number, _note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() gave
        signal.set_wakeup_fd(self._former_wakeup)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        """Readable once a signal has come."""
        return self._read

    def take(self) -> list[signal.Signals]:
        """Those that have come since the last call, in their order."""
        try:
            numbers = os.read(self._read, 4096)
        except BlockingIOError:
            return []
        noted = (*PREEMPTION, *INTERRUPTION)
        return [signal.Signals(number) for number in numbers if number in noted]


def _note(number: int, frame: object) -> None:
    """The number is in the pipe by now: Python writes it there before it calls a handler."""
