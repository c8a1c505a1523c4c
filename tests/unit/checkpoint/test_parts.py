"""Buffers of any sizes arrive as the same bytes, whatever goes together on the way."""

from __future__ import annotations

import socket
import threading

from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.checkpoint.keeper import messages

SIZES = st.lists(
    st.one_of(st.integers(0, 40), st.sampled_from([65_535, 65_536, 1 << 20, (1 << 20) + 1, 2_500_000])), max_size=30
)


@given(SIZES)
def test_parts_arrive_whole(sizes: list[int]) -> None:
    buffers = [bytes([index % 251]) * size for index, size in enumerate(sizes)]
    here, there = socket.socketpair()
    with here, there:
        sender = threading.Thread(target=messages.send_parts, args=(here, buffers))
        sender.start()
        received = [bytes(part) for part in messages.receive_parts(there)]
        sender.join()
    assert b"".join(received) == b"".join(buffers)
    assert all(0 < len(part) <= messages.PART_BYTES for part in received)
    assert len(received) <= sum(size // messages.PART_BYTES + 1 for size in sizes if size >= 65_536) * 2 + 1
