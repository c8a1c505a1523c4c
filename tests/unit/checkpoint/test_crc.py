"""Checksums of parts make up that of the whole."""

import zlib

from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.checkpoint.crc import combined
from lightning_dist.checkpoint.shard_stream import ShardStream, Source


@given(st.binary(max_size=3000), st.binary(max_size=3000))
def test_combined_is_that_of_both_end_to_end(first: bytes, second: bytes) -> None:
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_combined_holds_for_sizes_beyond_memory() -> None:
    # CRC of n zero bytes after a checksum, by doubling: 2^40 bytes are 2^39 and 2^39.
    crc = combined(zlib.crc32(b"start"), zlib.crc32(bytes(1 << 10)), 1 << 10)
    zeros = zlib.crc32(bytes(1 << 10))
    for power in range(10, 40):
        zeros = combined(zeros, zeros, 1 << power)
    whole = combined(zlib.crc32(b"start"), zeros, 1 << 40)
    rest = zlib.crc32(bytes(1 << 10))
    for power in range(10, 39):
        rest = combined(rest, rest, 1 << power)  # of 2^39
    assert combined(combined(zlib.crc32(b"start"), rest, 1 << 39), rest, 1 << 39) == whole
    assert crc == zlib.crc32(b"start" + bytes(1 << 10))


@given(st.lists(st.binary(max_size=200), max_size=8))
def test_a_stream_knows_its_checksums_each_time_it_is_iterated(parts: list[bytes]) -> None:
    stream = ShardStream([Source(len(part), lambda part=part: memoryview(part)) for part in parts])  # type: ignore[misc]
    for _ in range(2):
        data = b"".join(stream)
        assert len(data) == stream.size_bytes
        assert stream.crc32 == zlib.crc32(data)
        assert stream.crcs == [zlib.crc32(part) for part in parts]
        assert [data[s : s + len(p)] for s, p in zip(stream.starts, parts, strict=True)] == parts
        assert all(start % 64 == 0 for start, part in zip(stream.starts, parts, strict=True) if part)
