"""Checks of single values: what was given, what is allowed."""

from __future__ import annotations

import dataclasses
import math
import os
import re

from lightning_dist.errors import ConfigError, unknown_option

MIB = 1 << 20
BYTE_UNITS = {
    "B": 1,
    "KB": 10**3,
    **{f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate("kMGT", start=1)},
    **{f"{prefix}iB": 2 ** (10 * power) for power, prefix in enumerate("KMGT", start=1)},
}
_URL = re.compile(r"[A-Za-z][\w+.-]+:[:/]")


def check_choice(what: str, given: str, allowed: tuple[str, ...]) -> None:
    """Refuse a name that is none of the allowed ones; ``what`` is the option's name."""
    if given not in allowed:
        raise unknown_option(what, given, allowed)


def check_range(what: str, given: float, *, low: float, high: float | None = None, unit: str) -> None:
    """Refuse what is no number, or not from ``low`` to ``high``; ``unit`` is of all three, in words."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise ConfigError(f"{what} is a number of {unit}, got {given!r} ({type(given).__name__})")
    if not math.isfinite(given) or given < low or (high is not None and given > high):
        allowed = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
        raise ConfigError(f"{what}={given:g} {unit}: must be {allowed} {unit}")


def check_count(what: str, given: float, *, low: int, high: int | None = None, unit: str) -> None:
    """Refuse what is no whole number from ``low`` to ``high``, 2.0 too; ``unit`` is in words."""
    check_range(what, given, low=low, high=high, unit=unit)
    if not isinstance(given, int):
        raise ConfigError(f"{what}={given!r} {unit}: must be a whole number, e.g. {max(low, round(given))}")


def check_flags(what: str, config: object) -> None:
    """Refuse other values than true and false in the fields of a dataclass whose default is one of them.

    Text is always true for Python, ``"false"`` too.
    """
    assert dataclasses.is_dataclass(config)
    for field in dataclasses.fields(config):
        given = getattr(config, field.name)
        if isinstance(field.default, bool) and not isinstance(given, bool):
            raise ConfigError(f"{what}.{field.name}={given!r} ({type(given).__name__}): must be true or false")


def is_url(given: str | os.PathLike[str]) -> bool:
    """Whether it names a place by protocol: ``s3://a``, also where a path has made one slash of two."""
    return _URL.match(os.fspath(given)) is not None


def check_local(what: str, given: str | os.PathLike[str] | None) -> None:
    """Refuse a URL where only a folder will do; ``None`` is none."""
    if given is not None and is_url(given):
        raise ConfigError(
            f"{what}={os.fspath(given)} is a URL, and these files are local: write a folder, e.g. outputs/monitor"
        )


def parse_bytes(what: str, given: int | str) -> int:
    """Bytes from a whole number, or from a number with a unit.

    Args:
        what: Name of the option, for messages.
        given: E.g. ``8000000000``, ``"8GB"``, ``"1.5 GiB"``.

    Raises:
        ConfigError: It is neither; the message lists the units.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", given) if isinstance(given, str) else None
    if match and (match[2] or "B") in BYTE_UNITS:
        return int(float(match[1]) * BYTE_UNITS[match[2] or "B"])
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    raise ConfigError(
        f"{what}={given!r} is no size: write a whole number of bytes, or a number with one of the units "
        f"{', '.join(BYTE_UNITS)}, e.g. 8GB"
    )
