"""CRC-32 of bytes laid end to end, from the CRC-32 of each part: no byte is read twice.

The polynomial is zlib's. :func:`combined` is zlib's ``crc32_combine``, which Python does not expose: the checksum of
the first part is multiplied by x to the power of the bits that follow, modulo the polynomial (Adler, zlib, crc32.c).
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # bit 31 is the coefficient of x^0


def combined(first: int, second: int, second_bytes: int) -> int:
    """CRC-32 of two byte strings laid end to end.

    Args:
        first: CRC-32 of the first.
        second: CRC-32 of the second.
        second_bytes: Length of the second, in bytes.
    """
    return _product(_power(second_bytes), first) ^ second


def _product(a: int, b: int) -> int:
    """Product of two polynomials modulo the CRC's."""
    result, mask = 0, 1 << 31
    while mask:
        if a & mask:
            result ^= b
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
        mask >>= 1
    return result


@lru_cache(maxsize=4096)
def _power(size_bytes: int) -> int:
    """X to the power of 8 times so many bytes."""
    result, square, bits = 1 << 31, 1 << 30, 8 * size_bytes
    while bits:
        if bits & 1:
            result = _product(square, result)
        square = _product(square, square)
        bits >>= 1
    return result
