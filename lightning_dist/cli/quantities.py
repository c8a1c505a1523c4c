"""Numbers with units, as a command line gives them."""

from __future__ import annotations

import math
import re

from lightning_dist.errors import ConfigError

_MULTIPLES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"


def number_of(option: str, text: str) -> float:
    """A count: ``25000000``, ``25M``, ``7B``.

    Raises:
        ConfigError: It is none.
    """
    match = re.fullmatch(_NUMBER + "([kmbt]?)", text.strip().lower().replace("_", ""))
    if match is None:
        raise ConfigError(f"{option} {text!r} is no number; write e.g. 25000000, 25M or 7B")
    return float(match[1]) * _MULTIPLES[match[2]]


def check_positive(option: str, given: float, *, example: str) -> None:
    """Refuse what is no positive number: also ``nan`` and ``inf``, which Python reads as such.

    Raises:
        ConfigError: It is none.
    """
    if not 0 < given < math.inf:
        raise ConfigError(f"{option} must be a positive number, got {given:g}; write e.g. {example}")


def check_share(option: str, given: float, *, example: str) -> None:
    """Refuse what is no share of a whole.

    Raises:
        ConfigError: It is none.
    """
    if not 0 <= given <= 1:
        raise ConfigError(f"{option} must be between 0 and 1, got {given:g}; write e.g. {example}")


def rate_of(option: str, text: str) -> float:
    """What a link carries, in bytes a second: ``100gbit``, ``400 Mbit/s``, ``12.5GB/s``.

    Raises:
        ConfigError: It is none.
    """
    match = re.fullmatch(_NUMBER + r"\s*([kmgt]?)(bits?|b|bytes?)(?:/s|ps)?", text.strip(), flags=re.IGNORECASE)
    rate = 0.0
    if match is not None:
        # A lone letter: B are bytes, as in GB/s, and b are bits, as in Gb/s.
        bits = match[3].lower().startswith("bit") or match[3] == "b"
        rate = float(match[1]) * _MULTIPLES[match[2].lower()] / (8 if bits else 1)
    if not 0 < rate < float("inf"):
        raise ConfigError(f"{option} {text!r} is no rate of a link; write e.g. 100gbit, 400mbit or 12.5GB/s")
    return rate
