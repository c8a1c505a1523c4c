"""Figures in sentences."""

from __future__ import annotations

from collections.abc import Sequence

_SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_MOST_RANKS = 8


def seconds(value_s: float) -> str:
    """``1.2 s``, ``34 ms`` or ``0.5 ms``."""
    if value_s >= 1:
        return f"{value_s:.3g} s"
    return f"{value_s * 1e3:.3g} ms"


def size(value_bytes: float) -> str:
    """``1.5 GB``, ``27 MB``, ..."""
    for unit, factor in _SIZES:
        if value_bytes >= factor:
            return f"{value_bytes / factor:.3g} {unit}"
    return f"{value_bytes:.3g} bytes"


def rate(bytes_per_s: float) -> str:
    """A link's rate, as links are sold: ``200 Mbit/s``, ``10 Gbit/s``."""
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def percent(share: float) -> str:
    """``34 %``; small ones with a decimal."""
    return f"{share:.1%}" if 0 < share < 0.05 else f"{share:.0%}"


def ranks(numbers: Sequence[int]) -> str:
    """``rank 3``, ``ranks 1, 2``; long lists are cut."""
    shown = ", ".join(map(str, numbers[:_MOST_RANKS]))
    if len(numbers) > _MOST_RANKS:
        shown += f", ... ({len(numbers)} in all)"
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"
