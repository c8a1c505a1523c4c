"""Steps of a capture, written to a run's files."""

from __future__ import annotations

import dataclasses
from collections import deque
from pathlib import Path
from statistics import median

import lightning.pytorch as pl

from lightning_dist.capture.facts import rank_header, run_facts
from lightning_dist.capture.trainer_capture import TrainerCapture
from lightning_dist.monitor.rank_file import RankWriter
from lightning_dist.monitor.record import RunFacts
from lightning_dist.monitor.run_files import write_facts
from lightning_dist.monitor.steps import CutStep

_FIRST = 3  # steps whose timelines are written
_RECENT = 50  # steps that say what is usual
_ENOUGH = 10  # of them
_SLOW = 2.0  # times the usual
_MOST_SLOW = 100  # timelines of slow steps, in a run


class StepFiles:
    """The file of this rank's steps, and of the run's facts on rank 0.

    Args:
        capture: Whose steps.
        folder: Of the run; ``None``: nothing can be written.
        spans_every: Of each how many-th step the whole timeline is written.
        flops_per_sample: For the run's facts.
        peak_flops: Likewise.
    """

    def __init__(
        self,
        capture: TrainerCapture,
        *,
        folder: Path | None,
        spans_every: int,
        flops_per_sample: float | None,
        peak_flops: float | None,
    ) -> None:
        self.folder = folder
        self.problem: str | None = None if folder is not None else "rank 0 cannot make the run's folder"
        self._capture = capture
        self._spans_every = spans_every
        self._flops_per_sample = flops_per_sample
        self._peak_flops = peak_flops
        self._writer: RankWriter | None = None
        self._facts: RunFacts | None = None  # on rank 0, until the first step
        self._recent_s: deque[float] = deque(maxlen=_RECENT)
        self._usual_s: float | None = None
        self.num_steps = 0  # written
        self._num_slow = 0

    def open(self, trainer: pl.Trainer) -> None:
        """Begin to write; what goes wrong is kept in :attr:`problem`."""
        if self.folder is None or self._writer is not None:
            return
        try:
            header = rank_header(trainer, unavailable=self._capture.unavailable)
            if trainer.is_global_zero:
                self._facts = run_facts(trainer, peak_flops=self._peak_flops, flops_per_sample=self._flops_per_sample)
                write_facts(self.folder, self._facts)
            self._writer = RankWriter(self.folder, "steps", header)
            self._capture.on_cut(self._write)
        except Exception as error:
            self.problem = f"nothing is written to {self.folder}: {type(error).__name__}: {error}"

    def close(self) -> str | None:
        """Write what is left; what went wrong, if anything did. Safe to call twice."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            self.problem = self.problem or writer.problem
            if self.problem is None and writer.lost_lines:
                self.problem = f"{writer.lost_lines} records are missing in {writer.path}: the disk stood still"
        said, self.problem = self.problem, None
        return said

    def _write(self, cut: CutStep) -> None:
        assert self._writer is not None
        if self._facts is not None:
            self._add_flops(self._facts)
        self._writer.step(cut.record)
        if self._wants_spans(cut.record.duration_s):
            self._writer.spans(cut.record.step, cut.spans())
        self.num_steps += 1

    def _add_flops(self, facts: RunFacts) -> None:
        """What the first batch has shown, once."""
        self._facts = None
        counted = self._capture.flops_per_sample
        if counted is not None and facts.flops_per_sample is None and self.folder is not None:
            write_facts(self.folder, dataclasses.replace(facts, flops_per_sample=counted))

    def _wants_spans(self, duration_s: float) -> bool:
        number = self.num_steps
        slow = self._usual_s is not None and duration_s > _SLOW * self._usual_s and self._num_slow < _MOST_SLOW
        self._num_slow += slow
        self._recent_s.append(duration_s)
        if number % _ENOUGH == _ENOUGH - 1:
            self._usual_s = median(self._recent_s)
        return slow or number < _FIRST or number % self._spans_every == 0
