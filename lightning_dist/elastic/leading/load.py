"""What two hosts send each other to see how much the way between them carries.

The caller sends messages of kind ``load`` with filler in them; the last says how many bytes it wants back. The
endpoint, whether it leads or not, answers with ``loaded`` once all is there, and then with so much filler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_dist.elastic.leading.channel import Channel

MOST_BYTES = 4 << 20
_PART_BYTES = 64 << 10


def load(size_bytes: int) -> Iterator[dict[str, Any]]:
    """Messages with so many bytes of filler."""
    for begin in range(0, size_bytes, _PART_BYTES):
        yield {"kind": "load", "filler": "0" * min(_PART_BYTES, size_bytes - begin)}


async def take_load(channel: Channel, message: Mapping[str, Any]) -> None:
    """Answer loads until the caller hangs up, which ends it with an error.

    Args:
        channel: To the caller.
        message: Its first load.

    Raises:
        ConnectionError: It has hung up, wants too much, or says something else.
    """
    while True:
        wanted_bytes = int(message.get("wanted_bytes", 0))
        if message.get("kind") != "load" or not 0 <= wanted_bytes <= MOST_BYTES:
            raise ConnectionError(f"{message.get('kind')!r} of {wanted_bytes} bytes is no load that is answered")
        if wanted_bytes:
            for part in ({"kind": "loaded"}, *load(wanted_bytes)):
                channel.send(part)
        message = await channel.receive()
