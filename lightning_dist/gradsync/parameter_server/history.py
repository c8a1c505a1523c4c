"""What the last steps have changed in some rows: so that the rows of a step before can still be told."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Step:
    """Attributes:
    version: What it has made.
    rows: [k], ascending, that it has changed.
    before: [k, ...], their values before; ``None`` where nobody asks for them.
    """

    version: int
    rows: Tensor
    before: Tensor | None


class History:
    """The changes of the last steps.

    Args:
        num_steps: So many are remembered.
    """

    def __init__(self, num_steps: int) -> None:
        self._steps: deque[_Step] = deque(maxlen=num_steps)

    def note(self, version: int, rows: Tensor, before: Tensor | None = None) -> None:
        """The step that makes ``version`` changes some rows.

        Args:
            version: One more than that noted before.
            rows: [k] of int64, ascending, each once.
            before: [k, ...], their values before the step.
        """
        self._steps.append(_Step(version, rows, before))

    def put_back(self, rows: Tensor, values: Tensor, version: int) -> None:
        """Make values of now those of a version before, in place.

        Args:
            rows: [n] of int64.
            values: [n, ...] of them.
            version: At most as many steps back as are remembered.
        """
        for step in reversed(self._steps):  # of a row that several have changed, the oldest has the last word
            if step.version <= version:
                break
            assert step.before is not None, "it is noted where earlier versions are asked for"
            found, places = _find(rows, step.rows)
            values[found] = step.before[places[found]]

    def changed(self, rows: Tensor, since: int, until: int) -> Tensor:
        """[n] of bool: which rows may differ between two versions; all, if it is not remembered."""
        known = {step.version: step for step in self._steps}
        changed = torch.zeros(rows.shape, dtype=torch.bool)
        for version in range(since + 1, until + 1):
            if version not in known:
                return torch.ones_like(changed)
            changed |= _find(rows, known[version].rows)[0]
        return changed


def _find(rows: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows are among some, and where there."""
    if not among.numel():
        return torch.zeros(rows.shape, dtype=torch.bool), torch.zeros_like(rows)
    places = torch.searchsorted(among, rows).clamp_(max=among.numel() - 1)
    return among[places] == rows, places
