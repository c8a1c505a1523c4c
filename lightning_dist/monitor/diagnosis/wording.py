"""Figures in sentences."""

from __future__ import annotations

from collections.abc import Sequence

_SIZES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_RATES = (("Tbit/s", 1e12), ("Gbit/s", 1e9))
_ROUNDED = 0.9995  # of a unit: from here on three figures are those of the unit
_MOST_RANKS = 8


def seconds(value_s: float) -> str:
    """``31 min``, ``1.2 s``, ``34 ms`` or ``0.5 ms``."""
    for unit, factor in (("h", 3600.0), ("min", 60.0)):
        if value_s >= 2 * factor:
            return f"{figures(value_s / factor)} {unit}"
    if value_s >= _ROUNDED:
        return f"{figures(value_s)} s"
    return f"{figures(value_s * 1e3)} ms"


def size(value_bytes: float) -> str:
    """``1.5 GB``, ``27 MB``, ..."""
    for unit, factor in _SIZES:
        if value_bytes >= _ROUNDED * factor:
            return f"{figures(value_bytes / factor)} {unit}"
    return f"{figures(value_bytes)} bytes"


def rate(bytes_per_s: float) -> str:
    """A link's rate, as links are sold: ``200 Mbit/s``, ``10 Gbit/s``."""
    bits = bytes_per_s * 8
    for unit, factor in _RATES:
        if bits >= _ROUNDED * factor:
            return f"{figures(bits / factor)} {unit}"
    return f"{figures(bits / 1e6)} Mbit/s"


def percent(share: float) -> str:
    """``34 %``; small ones with a decimal."""
    return f"{share:.1%}" if 0 < share < 0.05 else f"{share:.0%}"


def ranks(numbers: Sequence[int]) -> str:
    """``rank 3``, ``ranks 1, 2``; long lists are cut."""
    shown = ", ".join(map(str, numbers[:_MOST_RANKS]))
    if len(numbers) > _MOST_RANKS:
        shown += f", ... ({len(numbers)} in all)"
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"


def figures(value: float) -> str:
    """Three, without an exponent for large ones."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"
