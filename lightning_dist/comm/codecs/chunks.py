"""How large chunks are, whose values cross encoded."""

from __future__ import annotations

from lightning_dist.comm.codecs.codec import Codec

SMALLEST_MESSAGE_BYTES = 64 << 10
"""Of what is sent at a time to one rank: below it the headers of messages, and waits for each, begin to weigh."""

_FP32_BYTES = 4


def encoded_chunk_bytes(codec: Codec | None, chunk_bytes: int, *, at_most: int, messages: int) -> int:
    """The size of chunks, doubled until their messages are large enough or a chunk is a bucket.

    Args:
        codec: How values are encoded; ``None`` leaves chunks as they are.
        chunk_bytes: Largest chunk of values that are not encoded, in bytes.
        at_most: Largest chunk, in bytes.
        messages: Pieces of a chunk that are sent by themselves.
    """
    if codec is None:
        return chunk_bytes
    while 2 * chunk_bytes <= at_most:
        if codec.encoded_bytes(chunk_bytes // (_FP32_BYTES * messages)) >= SMALLEST_MESSAGE_BYTES:
            break
        chunk_bytes *= 2
    return chunk_bytes
