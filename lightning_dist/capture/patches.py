"""Methods of living objects replaced for a time, and put back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MISSING = object()


@dataclass
class _Patch:
    owner: Any
    name: str
    before: Any  # what the object itself held; its class's is found again when this is removed
    replacement: Any


class Patches:
    """Replaced attributes of objects; :meth:`undo` puts back what was there.

    What somebody else has replaced since is left alone, so a replacement must go on working after :meth:`undo`.
    """

    def __init__(self) -> None:
        self._patches: list[_Patch] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put ``make(what is there)`` in the place of an attribute.

        Raises:
            AttributeError: There is none of this name.
        """
        replacement = make(getattr(owner, name))
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, replacement)
        self._patches.append(_Patch(owner, name, before, replacement))

    def undo(self) -> None:
        """Put back all of them, the last first. Safe to call twice."""
        while self._patches:
            patch = self._patches.pop()
            if vars(patch.owner).get(patch.name) is not patch.replacement:
                continue
            if patch.before is _MISSING:
                delattr(patch.owner, patch.name)
            else:
                setattr(patch.owner, patch.name, patch.before)
