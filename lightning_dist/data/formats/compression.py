"""Compressed shards: read whole, because none of these formats can be entered in the middle."""

from __future__ import annotations

import bz2
import gzip
import io
import zlib
from collections.abc import Callable
from typing import IO, Any, cast

from lightning_dist.data.packages import needed
from lightning_dist.errors import UnreadableShardError

_BLOCK_BYTES = 1 << 20


def compression_of(name: str) -> str | None:
    """Key of :data:`OPENERS` by a file's ending; ``None`` if it is not compressed."""
    ending = name.rpartition(".")[2].lower()
    return {"gz": "gz", "tgz": "gz", "zst": "zst", "zstd": "zst", "bz2": "bz2"}.get(ending)


def open_stream(file: IO[bytes], kind: str) -> IO[bytes]:
    """A file that is decompressed while it is read."""
    return OPENERS[kind](file)


def decompressed(data: memoryview | bytes, kind: str | None, what: str) -> memoryview:
    """All bytes of a shard; the given ones if ``kind`` is None.

    Args:
        data: As stored.
        kind: Of :data:`OPENERS`.
        what: Is read, for messages.

    Raises:
        UnreadableShardError: The bytes are damaged.
    """
    if kind is None:
        return memoryview(data)
    try:
        with open_stream(io.BytesIO(data), kind) as stream:
            return memoryview(stream.read())
    except Exception as error:
        if not is_damage(error):
            raise
        raise UnreadableShardError(f"{what} cannot be decompressed ({kind}): {error}") from error


def is_damage(error: BaseException) -> bool:
    """Whether an error of a decompressor says that its input is damaged."""
    zstd = type(error).__module__.startswith("zstd") or type(error).__name__ == "ZstdError"
    return zstd or isinstance(error, (OSError, EOFError, zlib.error))


def _open_zst(file: IO[bytes]) -> IO[bytes]:
    zstandard = needed("zstandard", package="zstandard", what="reading .zst")
    return io.BufferedReader(_Frames(file, zstandard.ZstdDecompressor()), _BLOCK_BYTES)


class _Frames(io.RawIOBase):
    """Zstandard frames laid end to end. The package's own stream ends without a word where a file was cut off."""

    def __init__(self, file: IO[bytes], decompressor: Any) -> None:
        self._file = file
        self._decompressor = decompressor
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, target: Any) -> int:
        """Fill from what is decompressed; 0 at the end."""
        while not self._ready:
            block = self._file.read(_BLOCK_BYTES)
            if not block:
                if self._frame is not None:
                    raise EOFError("it ends inside a frame")
                return 0
            self._ready = memoryview(self._decompress(block))
        count = min(len(target), len(self._ready))
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self, block: bytes) -> bytes:
        parts = []
        while block:
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            parts.append(self._frame.decompress(block))
            block = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        return b"".join(parts)


OPENERS: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {
    "gz": lambda file: cast(IO[bytes], gzip.GzipFile(fileobj=file)),
    "zst": _open_zst,
    "bz2": lambda file: cast(IO[bytes], bz2.BZ2File(file)),
}
