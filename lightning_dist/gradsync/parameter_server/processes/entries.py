"""Named values in a message: of tensors what they are like, with their bytes behind it; and numbers as they are."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dist.gradsync.parameter_server.server import receive_bytes, send_bytes

_DTYPES = {
    str(each).removeprefix("torch."): each
    for each in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)
}
_MOST = 64  # entries of a message


def described(entries: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the header of a message says of them."""
    return [
        {"name": name, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        if isinstance(value, Tensor)
        else {"name": name, "value": value}
        for name, value in entries.items()
    ]


def send(connection: socket.socket, entries: Mapping[str, Any]) -> None:
    """What follows the header."""
    for value in entries.values():
        if isinstance(value, Tensor):
            send_bytes(connection, value)


def receive(
    connection: socket.socket, said: Sequence[Mapping[str, Any]], *, rows: int, row_bytes: int
) -> dict[str, Any]:
    """What follows a header that says this.

    Args:
        connection: Where from.
        said: Of the header.
        rows: Of the table; no entry has more.
        row_bytes: Of a row of the table; an entry has at most a double for each of its values.

    Raises:
        ValueError: It says of an entry what none is.
    """
    if len(said) > _MOST:
        raise ValueError(f"{len(said)} entries")
    found: dict[str, Any] = {}
    for each in said:
        if "dtype" not in each:
            found[str(each["name"])] = each["value"]
            continue
        dtype, shape = _DTYPES[each["dtype"]], [int(size) for size in each["shape"]]
        size_bytes = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or size_bytes > max(8, 8 * rows * row_bytes):
            raise ValueError(f"an entry of {size_bytes} bytes for a table of {rows} rows")
        found[str(each["name"])] = receive_bytes(connection, size_bytes).view(dtype).view(shape)
    return found
