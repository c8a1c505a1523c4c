"""Fields of JSON that somebody else has written: each is taken by its type; an error names the file and the field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lightning_dist.errors import DamagedCheckpointError


class Fields:
    """A JSON object.

    Args:
        values: The object.
        where: The file it is from.
        path: Of the object inside the file, dotted; empty for the outermost.
    """

    def __init__(self, values: dict[str, Any], where: str, path: str = "") -> None:
        self._values = values
        self._where = where
        self._path = path

    @classmethod
    def parse(cls, data: bytes, where: str) -> Fields:
        """The object that a file holds; raises :class:`DamagedCheckpointError` if it holds none."""
        try:
            values = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpointError(f"{where} is no JSON: {error}") from error
        if not isinstance(values, dict):
            raise DamagedCheckpointError(f"{where} holds a {type(values).__name__}, not an object")
        return cls(values, where)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def whole(self, key: str) -> int:
        """A whole number of at least 0."""
        value = self._take(key, int, "a whole number")
        if value < 0:
            raise self.error(key, f"is {value}, less than 0")
        return int(value)

    def number(self, key: str) -> float:
        """Any number."""
        return float(self._take(key, (int, float), "a number"))

    def text(self, key: str) -> str:
        """A text."""
        return str(self._take(key, str, "a text"))

    def wholes(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers of at least 0."""
        values = self._take(key, list, "a list")
        if not all(type(value) is int and value >= 0 for value in values):
            raise self.error(key, f"is {str(values)[:60]}, not a list of whole numbers")
        return tuple(values)

    def mapping(self, key: str) -> dict[str, Any]:
        """An object, as it is."""
        return dict(self._take(key, dict, "an object"))

    def items(self, key: str) -> Iterator[tuple[str, Fields]]:
        """The objects in an object, by name."""
        for name, value in self._take(key, dict, "an object").items():
            yield name, self._inner(f"{key}[{name!r}]", value)

    def list(self, key: str) -> Iterator[Fields]:
        """The objects in a list."""
        for index, value in enumerate(self._take(key, list, "a list")):
            yield self._inner(f"{key}[{index}]", value)

    def error(self, key: str, what: str) -> DamagedCheckpointError:
        """An error about a field; about the object itself if ``key`` is empty."""
        return DamagedCheckpointError(f"{self._where}: {self._name(key)} {what}")

    def _inner(self, key: str, value: object) -> Fields:
        if not isinstance(value, dict):
            raise self.error(key, f"is {str(value)[:60]!r}, not an object")
        return Fields(value, self._where, self._name(key))

    def _take(self, key: str, kind: type | tuple[type, ...], what: str) -> Any:
        if key not in self._values:
            raise self.error(key, "is missing")
        value = self._values[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.error(key, f"is {str(value)[:60]!r}, not {what}")
        return value

    def _name(self, key: str) -> str:
        return f"{self._path}.{key}".strip(".")
