"""The random state of a rank where training goes on: its own, or, on another number of ranks, one that follows from it.

Rank r goes on with the state of rank r modulo the number of ranks that saved. Where there are more ranks now, several
would have the same state. If those that saved had drawn alike (all of one seed, as ``seed_everything`` leaves them), so
do these; else the later ones are seeded with what they draw from it. So nothing that was drawn before is drawn again,
and the same start gives the same numbers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states

_SEEDS = 1 << 32  # numpy takes no larger ones


@dataclass(frozen=True)
class Successor:
    """Whose state a rank goes on with.

    Attributes:
        rank: One of those that saved.
        other: Another one, to see whether they had drawn alike.
        turn: How many ranks before this one go on with the same.
    """

    rank: int
    other: int
    turn: int

    @classmethod
    def of(cls, rank: int, saved_by: int) -> Successor:
        """Of a rank, where so many have saved."""
        return cls(rank % saved_by, (rank + 1) % saved_by, rank // saved_by)


def collect() -> dict[str, Any]:
    """The state of this process, in few objects, since each costs time where a step waits for a snapshot."""
    states = dict(_collect_rng_states())
    version, numbers, spare = states["python"]
    return {**states, "python": (version, np.array(numbers, dtype=np.uint32), spare)}


def restore(state: Mapping[str, Any], other: Mapping[str, Any] | None, *, turn: int) -> None:
    """Make a state that of this process, or one that follows from it.

    Args:
        state: What :func:`collect` gave on the rank that this one goes on from, or Lightning's own function.
        other: What it gave on another one; ``None``: nobody knows.
        turn: See :class:`Successor`.
    """
    version, numbers, spare = state["python"]
    _set_rng_states({**state, "python": (version, tuple(int(number) for number in numbers), spare)})
    if turn == 0 or other is None or torch.equal(state["torch"], other["torch"]):
        return
    drawn = int(torch.randint(_SEEDS, (turn,), dtype=torch.int64)[-1])
    torch.manual_seed(drawn)  # CUDA's, too
    random.seed(drawn)
    np.random.seed(drawn)  # the state that user code draws from
