"""HTML put together so that nothing of a record can become markup: text is escaped unless it is markup already."""

from __future__ import annotations

import html
import json
from typing import Any

_VOID = frozenset({"br", "col", "input", "link", "meta"})


class Markup(str):
    """Text that is HTML. Only what this library wrote may be one."""

    __slots__ = ()


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element.

    Args:
        name: Of the element.
        *children: What is in it, one after another: markup, or anything else as text. ``None`` is left out.
        **attributes: ``class_`` is written ``class``, other underscores become hyphens; ``None`` and ``False`` are left
            out, ``True`` stands without a value.
    """
    said = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Markup(f"<{name}{said}>")
    return Markup(f"<{name}{said}>{joined(*children)}</{name}>")


def joined(*children: object) -> Markup:
    """Markup and text, one after another."""
    return Markup("".join(_inside(child) for child in children if child is not None))


def _inside(child: object) -> str:
    return child if isinstance(child, Markup) else html.escape(str(child))


def json_inside(value: Any) -> Markup:
    """JSON that can stand in a ``script`` element: what could end it, or be an entity, is written as an escape."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
