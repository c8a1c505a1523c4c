"""Random generators of a rank, as a checkpoint has them: few objects, since each costs time in a step that waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states

_PYTHON = "python"


def collected() -> dict[str, Any]:
    """Those of Python, numpy and torch."""
    states = _collect_rng_states()
    version, numbers, spare = states[_PYTHON]
    states[_PYTHON] = version, np.array(numbers, dtype=np.uint32), spare
    return states


def restore(states: Mapping[str, Any]) -> None:
    """Set them to what :func:`collected` gave, or Lightning's own function."""
    version, numbers, spare = states[_PYTHON]
    _set_rng_states({**states, _PYTHON: (version, tuple(int(number) for number in numbers), spare)})
