"""Curves of an experiment, drawn as SVG. Pure; the page's style has the colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_dist.monitor.report.markup import Markup, element

Point = tuple[float, float]
_WIDTH, _HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 20, 30
_MOST_POINTS = 400
_TICKS = 5


@dataclass(frozen=True)
class Line:
    """A curve.

    Attributes:
        colour: Class of its stroke.
        points: From left to right.
        title: What a pointer on it says.
        is_thin: One of several, beside their mean.
    """

    colour: str
    points: Sequence[Point]
    title: str
    is_thin: bool = False


@dataclass(frozen=True)
class Band:
    """What lies between two curves: (x, low, high) from left to right."""

    colour: str
    points: Sequence[tuple[float, float, float]]


def chart(
    *, lines: Sequence[Line], bands: Sequence[Band] = (), limits: Sequence[tuple[float, str]] = (), x_name: str
) -> Markup:
    """A drawing of curves over a common axis; values that are not finite are left out.

    Args:
        lines: The curves.
        bands: Behind them.
        limits: Horizontal lines, each with what it is.
        x_name: Below the axis.
    """
    lines = [Line(line.colour, _finite(line.points), line.title, line.is_thin) for line in lines]
    points = [point for line in lines for point in line.points]
    points += [(x, y) for band in bands for x, low, high in band.points for y in (low, high)]
    points = _finite([*points, *((points[0][0], y) for y, _ in limits if points)])
    if not points:
        return element("p", "nothing to draw: no value is finite", class_="none")
    x_of = _scale([x for x, _ in points], _LEFT, _WIDTH - _RIGHT)
    y_of = _scale([y for _, y in points], _HEIGHT - _BOTTOM, _TOP)
    inside = [*_y_axis([y for _, y in points], y_of), *_x_axis([x for x, _ in points], x_of, x_name)]
    inside += [_band(band, x_of, y_of) for band in bands]
    inside += [_limit(level, title, y_of) for level, title in limits]
    inside += [_line(line, x_of, y_of) for line in lines if line.points]
    drawing = element("svg", *inside, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=x_name)
    return element("div", drawing, class_="plot")


def _line(line: Line, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> Markup:
    path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in _thinned(line.points))
    thin = " thin" if line.is_thin else ""
    return element("polyline", element("title", line.title), points=path, class_=f"arm {line.colour}{thin}")


def _band(band: Band, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> Markup:
    points = [each for each in band.points if all(map(math.isfinite, each))]
    points = points[:: max(1, len(points) // _MOST_POINTS)]
    upper = [f"{x_of(x):.1f},{y_of(high):.1f}" for x, _, high in points]
    lower = [f"{x_of(x):.1f},{y_of(low):.1f}" for x, low, _ in reversed(points)]
    return element("polygon", points=" ".join(upper + lower), class_=f"spread {band.colour}")


def _limit(level: float, title: str, y_of: Callable[[float], float]) -> Markup:
    y = f"{y_of(level):.1f}"
    return element(
        "g",
        element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="limit"),
        element("text", title, x=_WIDTH - _RIGHT, y=f"{y_of(level) - 4:.1f}", text_anchor="end"),
    )


def _y_axis(values: Sequence[float], y_of: Callable[[float], float]) -> list[Markup]:
    marks = []
    for value in ticks(min(values), max(values)):
        y = y_of(value)
        marks.append(element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"))
        marks.append(element("text", f"{value:.6g}", x=_LEFT - 6, y=f"{y + 4:.1f}", text_anchor="end"))
    return marks


def _x_axis(values: Sequence[float], x_of: Callable[[float], float], name: str) -> list[Markup]:
    bottom = _HEIGHT - _BOTTOM
    marks = [
        element("text", f"{value:.6g}", x=f"{x_of(value):.1f}", y=bottom + 14, text_anchor="middle")
        for value in ticks(min(values), max(values))
    ]
    return [*marks, element("text", name, x=(_LEFT + _WIDTH - _RIGHT) / 2, y=bottom + 27, text_anchor="middle")]


def ticks(low: float, high: float) -> list[float]:
    """Round values from ``low`` to ``high``, about five of them; the values themselves where they are one."""
    if high <= low:
        return [low]
    raw = (high - low) / _TICKS
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= raw)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def _scale(values: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    low, high = min(values), max(values)
    if high <= low:
        return lambda _: (start + end) / 2
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point[0]) and math.isfinite(point[1])]


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most so many as can be told apart, the last one among them."""
    every = max(1, math.ceil(len(points) / _MOST_POINTS))
    return [*points[::every], points[-1]]
