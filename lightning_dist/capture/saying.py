"""What a user is told while training goes on."""

from __future__ import annotations

import contextlib
import warnings


def say(text: str) -> None:
    """Warn; where warnings are errors, too, no training fails by it."""
    with contextlib.suppress(Warning):
        warnings.warn(text, stacklevel=2)
