"""Which bytes of files one request reads. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from lightning_dist.checkpoint.manifest import ByteRange

_Item = TypeVar("_Item")

GAP_BYTES = 1 << 16
"""Bytes between two ranges that are read, too, rather than asking twice."""


def neighbours(
    items: Iterable[_Item], place: Callable[[_Item], ByteRange], *, request_bytes: int
) -> Iterator[list[_Item]]:
    """Ranges that one request reads: neighbours in a file, up to a size; one that is larger is alone.

    Args:
        items: What is to be read, by file and first byte.
        place: Where an item is.
        request_bytes: Largest request.
    """
    batch: list[_Item] = []
    for item in items:
        if batch:
            first, last, own = place(batch[0]), place(batch[-1]), place(item)
            near = own.file == last.file and own.start - (last.start + last.size) <= GAP_BYTES
            if not near or own.start + own.size - first.start > request_bytes:
                yield batch
                batch = []
        batch.append(item)
    if batch:
        yield batch
