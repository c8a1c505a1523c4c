"""How a rank ended, and why."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_dist.elastic.policy.events import Cause

_WORDS = 2000  # letters of an error that are told
_CONSEQUENCES = ("PeerLostError", "CollectiveTimeoutError", "Connection closed by peer", "Connection reset by peer")


@dataclass(frozen=True)
class Exit:
    """A rank's end.

    Attributes:
        local_rank: Which.
        status: Exit code, or the signal, negative.
        cause: Why; ``None``: it ended well.
        detail: For people: what ended it, and its last words.
        is_consequence: Its last words accuse another rank.
        words: Its last words; empty if it left none.
    """

    local_rank: int
    status: int
    cause: Cause | None
    detail: str
    is_consequence: bool = False
    words: str = ""


def exit_of(local_rank: int, status: int, *, words: Path, was_short_of_memory: Callable[[], bool]) -> Exit:
    """Put together what is known.

    Args:
        local_rank: Which rank.
        status: Exit code, or the signal, negative.
        words: File of its last words, which need not be there.
        was_short_of_memory: Whether the kernel has killed for want of memory since this was last asked.
    """
    if status == 0:
        return Exit(local_rank, status, None, "ended")
    if status == -signal.SIGKILL and was_short_of_memory():
        return Exit(local_rank, status, Cause.OUT_OF_MEMORY, "killed by the kernel, which was out of memory")
    ended = f"killed by {_signal_name(-status)}" if status < 0 else f"exit code {status}"
    error = _error_in(words)
    is_consequence = any(sign in error for sign in _CONSEQUENCES)
    detail = f"{ended}: {error}" if error else ended
    return Exit(local_rank, status, Cause.SIGNAL if status < 0 else Cause.EXIT, detail, is_consequence, error)


class MemoryKills:
    """Counts the processes that the kernel has killed for want of memory, in this control group or on this machine.

    Args:
        counters: Files with a line ``oom_kill N``; the first that can be read counts.
    """

    def __init__(self, counters: Sequence[Path] | None = None) -> None:
        self._counters = _counters_of_this_process() if counters is None else counters
        self._seen = self._count()

    def grew(self) -> bool:
        """Whether there were any since the last call."""
        now = self._count()
        seen, self._seen = self._seen, now
        return now > seen

    def _count(self) -> int:
        for path in self._counters:
            try:
                lines = path.read_text().splitlines()
            except OSError:
                continue
            for line in lines:
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        return 0


def _counters_of_this_process() -> list[Path]:
    """Those of its control group (version 2, then 1), then the machine's."""
    root, found = Path("/sys/fs/cgroup"), []
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        groups = []
    for _, controllers, path in groups:
        folder = path.strip("/")
        if not controllers:
            found += [root / folder / "memory.events", root / "unified" / folder / "memory.events"]
        elif "memory" in controllers.split(","):
            found += [root / "memory" / folder / "memory.oom_control"]
    return [*found, Path("/proc/vmstat")]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _error_in(words: Path) -> str:
    """The error that a rank left, on one line; empty if it left none."""
    try:
        found: Any = json.loads(words.read_text(encoding="utf-8"))
        text = str(found["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    text = _cut(" ".join(text.split()))
    last = found.get("last_collective")
    return f"{text} (last collective: {_cut(str(last))})" if last else text


def _cut(text: str) -> str:
    """An error may print a tensor; what it is about stands at its beginning, as a rule."""
    return text if len(text) <= _WORDS else f"{text[:_WORDS]} ..."
