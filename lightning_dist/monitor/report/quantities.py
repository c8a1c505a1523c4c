"""Numbers with their units, as people write them."""

from __future__ import annotations

import math

SHARE, COUNT = "share", "count"
_SECONDS = ((0.9995, 1.0, "s"), (0.9995e-3, 1e3, "ms"), (0.0, 1e6, "µs"))
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def form_of(metric: str, unit: str) -> str:
    """How a metric's values are written: its unit, or for those without one ``"share"`` or ``"count"``."""
    if unit != "1":
        return unit
    return SHARE if metric.endswith(("_share", "_utilisation")) else COUNT


def text(value: float | None, form: str) -> str:
    """A value in three figures.

    Args:
        value: ``None`` and what is not finite is ``"unavailable"``.
        form: ``"s"``, ``"bytes"``, ``"bytes/s"``, ``"1/s"``, ``"W"``, ``"C"``, :data:`SHARE`, :data:`COUNT` or the name
            of what is counted, which is put behind the number.
    """
    if value is None or not math.isfinite(value):
        return "unavailable"
    if form == "s":
        return _seconds(value)
    if form == SHARE:
        return _share(value)
    if form == COUNT:
        whole = float(value).is_integer() or abs(value) >= 100
        return f"{value:,.0f}" if whole and abs(value) < 1e6 else _scaled(value, "").strip()
    if form == "1/s":
        return _scaled(value, "/s")
    if form == "bytes":
        return _scaled(value, "B")
    if form == "bytes/s":
        return _scaled(value, "B/s")
    return _scaled(value, "°C" if form == "C" else form)


def _seconds(value: float) -> str:
    size = abs(value)
    if size >= 120:
        minutes, seconds = divmod(round(size), 60)
        hours, minutes = divmod(minutes, 60)
        said = f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
        return f"-{said}" if value < 0 else said
    if value == 0:
        return "0 s"
    factor, unit = next((factor, unit) for limit, factor, unit in _SECONDS if size >= limit)
    return f"{_figures(value * factor)} {unit}"


def _share(value: float) -> str:
    if 0 < abs(value) < 0.0005:
        return "< 0.1 %" if value > 0 else "> -0.1 %"
    return f"{value * 100:.{0 if value == 0 or abs(value) >= 0.0995 else 1}f} %"


def _scaled(value: float, unit: str) -> str:
    for size, prefix in _PREFIXES:
        if abs(value) >= size * 0.9995:
            return f"{_figures(value / size)} {prefix}{unit}"
    return f"{_figures(value)} {unit}"


def _figures(value: float) -> str:
    """Three figures, without an exponent."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value) * 1.0005)))
    return f"{value:.{min(digits, 6)}f}"
