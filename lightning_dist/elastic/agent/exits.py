"""How a rank ended, and why."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_dist.elastic.policy.events import Cause

_FIRST = "memory.oom_control"  # of control groups of version 1
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
        was_short_of_memory: Whether the kernel has killed a process for want of memory that this was not asked for yet.
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
    """Counts the processes that the kernel has killed for want of memory, before it kills them.

    Args:
        counters: Files with a line ``oom_kill N``; ``None``: the one that counts the ranks of this process, and nobody
            else's. Control groups of version 1 count only themselves: those right below are looked at as well.
    """

    def __init__(self, counters: Sequence[Path] | None = None) -> None:
        self._counters = _counters_of_this_process() if counters is None else counters
        self.forget()

    def forget(self) -> None:
        """Those so far killed nobody who is asked for from now on."""
        self._seen = self._count()

    def take(self) -> bool:
        """Whether there was one that was not asked for yet."""
        now = self._count()
        is_new = now > self._seen
        self._seen = self._seen + 1 if is_new else now  # a group that is removed takes its count with it
        return is_new

    def _count(self) -> int:
        below = [each for path in self._counters if path.name == _FIRST for each in path.parent.glob(f"*/{_FIRST}")]
        return sum(map(_kills, [*self._counters, *below]))


def _kills(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _counters_of_this_process() -> list[Path]:
    """Of its control group, version 2 then 1; in a container the root may be that. Without groups, the machine's."""
    root = Path("/sys/fs/cgroup")
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        groups = []
    tried: list[Path] = []
    for _, controllers, group in sorted(groups, key=lambda parts: parts[1] != ""):
        if not controllers:
            tried += [root / group.strip("/") / "memory.events", root / "memory.events"]
        elif "memory" in controllers.split(","):
            tried += [root / "memory" / group.strip("/") / _FIRST, root / "memory" / _FIRST]
    return [next((path for path in tried if path.exists()), Path("/proc/vmstat"))]


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
