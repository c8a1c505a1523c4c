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
        self._columns = {name: _Column(table.column(name)) for name in names}
        self.num_rows = int(table.num_rows)
        self.size_bytes = int(table.nbytes)

    def row(self, index: int) -> dict[str, Any]:
        """Values by column: lists of numbers as arrays, all else as plain Python values; copies."""
        return {name: column.value(index) for name, column in self._columns.items()}


class _Column:
    """A column as one array, so that a value is found at once."""

    def __init__(self, column: Any) -> None:
        types = pyarrow("reading columns", "pyarrow.types")
        self._array = column.combine_chunks() if hasattr(column, "combine_chunks") else column
        kind = column.type
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        self._has_numbers = is_list and (types.is_integer(kind.value_type) or types.is_floating(kind.value_type))

    def value(self, index: int) -> Any:
        """One of its values."""
        scalar = self._array[index]
        if not self._has_numbers or not scalar.is_valid:
            return scalar.as_py()
        return scalar.values.to_numpy(zero_copy_only=False).copy()
