"""Rows of Arrow's columns, for the formats that pyarrow reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_dist.data.packages import needed


def pyarrow(what: str, module: str = "pyarrow") -> Any:
    """A module of pyarrow; from version 15 on it loads no classes that a file names."""
    return needed(module, package="pyarrow", what=what)


class Rows:
    """Rows of a table.

    Args:
        table: A pyarrow table or record batch.
        columns: To give; ``None``: all.
    """

    def __init__(self, table: Any, columns: Sequence[str] | None) -> None:
        names = table.schema.names if columns is None else columns
        self._columns = {name: _whole(table.column(name)) for name in names}
        self.num_rows = int(table.num_rows)

    def row(self, index: int) -> dict[str, Any]:
        """Values by column: lists of numbers as arrays, all else as plain Python values; copies."""
        return {name: _value(column[index]) for name, column in self._columns.items()}


def _whole(column: Any) -> Any:
    """A chunked column as one array, so that a value is found at once."""
    return column.combine_chunks() if hasattr(column, "combine_chunks") else column


def _value(scalar: Any) -> Any:
    values = getattr(scalar, "values", None)  # of lists only
    if values is None or not _is_number(values.type):
        return scalar.as_py()
    return values.to_numpy(zero_copy_only=False).copy()


def _is_number(kind: Any) -> bool:
    types = pyarrow("reading columns", "pyarrow.types")
    return bool(types.is_integer(kind) or types.is_floating(kind))
