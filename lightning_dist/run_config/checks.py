"""Checks of single values: what was given, what is allowed."""

from __future__ import annotations

import math

from lightning_dist.errors import ConfigError, unknown_option


def check_choice(what: str, given: str, allowed: tuple[str, ...]) -> None:
    """Refuse a name that is none of the allowed ones; ``what`` is the option's name."""
    if given not in allowed:
        raise unknown_option(what, given, allowed)


def check_number(
    what: str, given: float, *, low: float, high: float | None = None, below: float | None = None, whole: bool = False
) -> None:
    """Refuse what is no number, or no whole one, or below ``low``, above ``high``, or not below ``below``."""
    kind = "a whole number" if whole else "a number"
    if isinstance(given, bool) or not isinstance(given, int if whole else int | float) or math.isnan(given):
        raise ConfigError(f"{what}={given!r}: must be {kind}, got {type(given).__name__}")
    too_high = (high is not None and given > high) or (below is not None and given >= below)
    if given < low or too_high:
        end = f" and at most {high:g}" if high is not None else f" and below {below:g}" if below is not None else ""
        raise ConfigError(f"{what}={given:g}: must be at least {low:g}{end}")


def check_amount(what: str, given: int | float | None, *, low: int) -> None:
    """Check a number of batches, or a float that is a fraction of them."""
    if given is None:
        return
    check_number(what, given, low=low)
    if isinstance(given, float) and given > 1:
        raise ConfigError(f"{what}={given:g}: a fraction is at most 1.0; write {math.ceil(given)} for so many batches")
