"""Which files a tar file has, and where: read from front to back.

POSIX.1-2001 (ustar, pax) and GNU long names, as ``tar`` and Python's ``tarfile`` write them. That module does the same
at four times the cost, most of it for what is not needed here: a shard has ten thousand files, and is opened when its
first sample is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, NamedTuple, Protocol

_BLOCK = 512
_LONGEST_NAME = 1 << 20
_REGULAR = (b"0", b"\x00", b"7")


class TarDamage(Exception):
    """The bytes are no tar file, or it was cut off."""


class Member(NamedTuple):
    """A file in a tar file.

    Attributes:
        name: With its folders.
        start: First byte of what it holds.
        size_bytes: How many.
    """

    name: str
    start: int
    size_bytes: int


class Source(Protocol):
    """Bytes from front to back."""

    def read(self, size_bytes: int) -> bytes:
        """The next bytes; fewer at the end."""

    def skip(self, size_bytes: int) -> None:
        """Go on behind so many; :class:`TarDamage` if there are fewer."""


class Buffer:
    """Bytes in memory, or mapped, as a :class:`Source`."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def read(self, size_bytes: int) -> bytes:
        """See :class:`Source`."""
        found = bytes(self._data[self._at : self._at + size_bytes])
        self._at += len(found)
        return found

    def skip(self, size_bytes: int) -> None:
        """See :class:`Source`."""
        self._at += size_bytes
        if self._at > len(self._data):
            raise TarDamage(f"it ends at byte {len(self._data)}, inside a file")


class Stream:
    """A file that is read, as a :class:`Source`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size_bytes: int) -> bytes:
        """See :class:`Source`."""
        return self._file.read(size_bytes)

    def skip(self, size_bytes: int) -> None:
        """See :class:`Source`."""
        while size_bytes:
            found = len(self._file.read(min(size_bytes, 1 << 20)))
            if not found:
                raise TarDamage("it ends inside a file")
            size_bytes -= found


def members(source: Source) -> Iterator[Member]:
    """Regular files in their order; folders and links are left out.

    Raises:
        TarDamage: See there.
    """
    at, long_name, long_size = 0, None, None
    while True:
        header = source.read(_BLOCK)
        if not header.strip(b"\x00"):
            if at == 0 and len(header) < _BLOCK:
                raise TarDamage("it is empty")
            return  # the end is a block of zeros, or, of tools that leave it out, no block
        if len(header) < _BLOCK or not _is_header(header):
            raise TarDamage(f"at byte {at} should be the header of a file")
        at += _BLOCK
        size = _number(header[124:136])
        kind = header[156:157]
        padded = -(-size // _BLOCK) * _BLOCK
        if kind in (b"L", b"x"):
            if size > _LONGEST_NAME:
                raise TarDamage(f"at byte {at} is a name of {size} bytes")
            data = source.read(padded)[:size]
            if kind == b"L":
                long_name = data.rstrip(b"\x00").decode(errors="surrogateescape")
            else:
                fields = _pax(data)
                long_name, long_size = fields.get("path", long_name), fields.get("size")
            at += padded
            continue
        if long_size is not None:
            size = int(long_size)
            padded = -(-size // _BLOCK) * _BLOCK
        if kind in _REGULAR:
            name = long_name if long_name is not None else _name(header)
            yield Member(name.removeprefix("./"), at, size)
        elif kind not in b"123456gKXVS":
            raise TarDamage(f"at byte {at - _BLOCK} is something of the unknown kind {kind!r}")
        elif kind == b"S":
            raise TarDamage(f"{_name(header)} is a sparse file: write the shard without --sparse")
        if kind != b"g":
            long_name = long_size = None
        source.skip(padded)
        at += padded


def _is_header(header: bytes) -> bool:
    """Whether the checksum is right: the sum of all bytes, those of the checksum counted as blanks."""
    return _number(header[148:156]) == sum(header) - sum(header[148:156]) + 8 * 0x20


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU: in base 256
        return int.from_bytes(field[1:], "big")
    text = field.split(b"\x00", 1)[0].strip()
    try:
        return int(text or b"0", 8)
    except ValueError as error:
        raise TarDamage(f"{field!r} is no octal number") from error


def _name(header: bytes) -> str:
    name = header[:100].split(b"\x00", 1)[0]
    prefix = header[345:500].split(b"\x00", 1)[0] if header[257:263] == b"ustar\x00" else b""
    return (prefix + b"/" + name if prefix else name).decode(errors="surrogateescape")


def _pax(data: bytes) -> dict[str, str]:
    """Records "length key=value", whose length counts the whole record."""
    fields = {}
    while data:
        length, blank, _ = data.partition(b" ")
        if not blank or not length.isdigit() or not 0 < int(length) <= len(data):
            raise TarDamage("a pax header has a record of a wrong length")
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        fields[key.decode(errors="replace")] = value.decode(errors="surrogateescape")
        data = data[int(length) :]
    return fields
