"""What one rank measures, written to a file of its own by a thread: nothing here waits for a disk, or raises.

Steps become text in that thread, too: it does so while the training thread computes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

from lightning_dist.monitor import lines
from lightning_dist.monitor.record import RankHeader, Sample, Span, StepRecord

_MOST_LINES = 50_000  # kept for a disk that stands still; what comes then is forgotten


def rank_path(folder: Path, kind: str, rank: int) -> Path:
    """Where a rank's file of a kind (``"steps"``, ``"samples"``) is."""
    return folder / f"{kind}-{rank:05d}.jsonl"


class RankWriter:
    """A file of records, one a line, that a thread of its own writes. Any thread may hand it records.

    A file that is there is written over: whoever opens a writer takes a folder that no other run has. A failure to
    write ends the writing, not the training: see :attr:`problem`.

    Args:
        folder: The run's; made if it is not there.
        kind: ``"steps"`` or ``"samples"``; the start of the file's name.
        header: Its first line.
        flush_s: How often the thread writes, in seconds.
    """

    def __init__(self, folder: Path, kind: str, header: RankHeader, *, flush_s: float = 1.0) -> None:
        self.path = rank_path(folder, kind, header.rank)
        self.problem: str | None = None  # why nothing more is written
        self.lost_lines = 0  # forgotten, since the disk stood still
        self._lines: deque[str | Callable[[], str]] = deque([lines.header_line(header)])
        self._flush_s = flush_s
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"hierdist-monitor-{kind}", daemon=True)
        self._thread.start()

    def step(self, record: StepRecord) -> None:
        """Write a step, which nobody changes any more."""
        self._take(partial(lines.step_line, record))

    def sample(self, sample: Sample) -> None:
        """Write a value of a metric."""
        self._take(lines.sample_line(sample))

    def spans(self, step: int, spans: Sequence[Span]) -> None:
        """Write the timeline of a step."""
        self._take(partial(lines.spans_line, step, spans))

    def close(self, *, wait_s: float = 10.0) -> None:
        """Write what is left and end the thread; a disk that does not answer is not waited for longer.

        Safe to call twice.
        """
        self._ending.set()
        self._thread.join(wait_s)
        if self._thread.is_alive() and self.problem is None:
            self.problem = f"{self.path} could not be written within {wait_s:g} s"

    def _take(self, line: str | Callable[[], str]) -> None:
        if self.problem is not None or self._ending.is_set():
            return
        if len(self._lines) >= _MOST_LINES:
            self.lost_lines += 1
            return
        self._lines.append(line)

    def _run(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("w", encoding="utf-8") as file:
                while not self._ending.wait(self._flush_s):
                    self._write(file)
                self._write(file)
        except Exception as error:  # of the disk, or of a record that has no text
            what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self.problem = f"{self.path} could not be written: {what}"
            self._lines.clear()

    def _write(self, file: TextIO) -> None:
        count = len(self._lines)
        if count:
            file.write("".join(_text(self._lines.popleft()) + "\n" for _ in range(count)))
            file.flush()


def _text(line: str | Callable[[], str]) -> str:
    return line if isinstance(line, str) else line()
