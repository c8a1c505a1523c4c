"""Appends lines to a file from a thread of its own, so that slow storage holds up nobody else."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

_PATIENCE_S = 10.0


class LineWriter:
    """One file; made when its first line comes.

    Args:
        path: Of the file; what a writer that was killed left of a last line is cut off.
        say: Tells people, once, that the file cannot be written.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="hierdist-incidents", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Append a line, soon."""
        self._lines.put(line)

    def close(self) -> None:
        """Write what is left, and end; storage that does not answer is given up. Safe twice."""
        self._lines.put(None)
        self._thread.join(_PATIENCE_S)

    def _write(self) -> None:
        has_failed = is_whole = False
        while (line := self._lines.get()) is not None:
            try:
                if not is_whole:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    _cut_torn_line(self._path)
                    is_whole = True
                with self._path.open("ab") as file:
                    file.write(f"{line}\n".encode())
            except OSError as error:
                if not has_failed:
                    has_failed = True
                    self._say(f"{self._path} cannot be written: {error}; incidents are not recorded")


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        os.truncate(path, end)
