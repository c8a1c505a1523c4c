"""Which checkpoints a run has saved itself, and which of them is the newest. Pure.

A folder may hold checkpoints of earlier runs. One that goes on after a failure must not take those for its own: its
script may have begun anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_dist.checkpoint.catalog import Checkpoint, Found

_CLOCKS_S = 60.0
"""Clocks of a run's hosts may differ by so much."""
RUN = "run"
"""Entry of a manifest's record: which run has saved it."""


@dataclass(frozen=True)
class Lineage:
    """A run, over all of its starts.

    Attributes:
        run: Its name; ``None``: it has none.
        begun_s: When it was first started, seconds since 1970; infinite where that is not known.
        owns_name: No other run has its name: what carries it is its own, however old.
    """

    run: str | None
    begun_s: float
    owns_name: bool = False

    def has_saved(self, checkpoint: Checkpoint) -> bool:
        """Whether this run has saved it: by the run's name if both have one, and by when it was committed.

        Launchers other than ours give a name to later runs, too.
        """
        saved_by = checkpoint.manifest.record.get(RUN)
        if self.run is not None and saved_by is not None:
            knows_age = not self.owns_name and not math.isinf(self.begun_s)
            is_old = knows_age and checkpoint.manifest.created_s < self.begun_s - _CLOCKS_S
            return bool(saved_by == self.run) and not is_old
        return checkpoint.manifest.created_s >= self.begun_s

    def newest_first(self, found: Iterable[Found]) -> list[Found]:
        """Those of this run that are whole, by step: hosts' clocks may differ, and any host may have committed one."""
        own = [each for each in found if each.problem is None and each.checkpoint and self.has_saved(each.checkpoint)]
        return sorted(own, key=lambda each: progress_of(each.checkpoint), reverse=True)


def progress_of(checkpoint: Checkpoint | None) -> tuple[float, float]:
    """The larger, the further a run had come: by optimizer steps, then by the time of commit."""
    if checkpoint is None:
        return -1.0, -1.0
    return float(step_of(checkpoint)), checkpoint.manifest.created_s


def step_of(checkpoint: Checkpoint) -> int:
    """Optimizer steps that were done; -1 where it does not say."""
    step = checkpoint.manifest.record.get("step")
    return step if isinstance(step, int) else -1
