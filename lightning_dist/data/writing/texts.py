"""Texts as documents, documents as blocks, blocks dealt to shards: what is written where, before any text is read.

A document is a file, or bytes in memory. It is encoded a block of at most 1 MiB at a time, so that memory and work do
not depend on how long documents are. Shards are runs of blocks of about equal size. All of it follows from the order of
documents and their sizes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lightning_dist.errors import ConfigError

BLOCK_BYTES = 1 << 20
_LOOK_BACK_BYTES = 1 << 16

Text = str | os.PathLike[str] | bytes
"""A file, a folder, or a document itself."""


@dataclass(frozen=True)
class Document:
    """A text.

    Attributes:
        name: Without what depends on the machine: relative to the folder that was given.
        source: Its file, or its bytes.
        size_bytes: Of the text.
        changed_ns: When the file was last written to; 0 for bytes.
    """

    name: str
    source: Path | bytes
    size_bytes: int
    changed_ns: int

    @property
    def label(self) -> str:
        """For messages."""
        return f"document {self.name}" if isinstance(self.source, bytes) else str(self.source)

    def read(self, start: int, stop: int) -> bytes:
        """Bytes ``start`` up to ``stop``.

        Raises:
            ConfigError: The file is no longer what it was.
        """
        if isinstance(self.source, bytes):
            return self.source[start:stop]
        try:
            with self.source.open("rb") as file:
                file.seek(start)
                found = file.read(stop - start)
        except OSError as error:
            raise ConfigError(f"{self.source} cannot be read: {error}") from error
        if len(found) != stop - start:
            raise ConfigError(f"{self.source} became shorter while it was read; start again once nobody writes to it")
        return found


class Block(NamedTuple):
    """A part of a document.

    Attributes:
        document: Its number.
        start: First byte, before it is moved to the end of a line.
        stop: The byte after the last one, before it is moved.
    """

    document: int
    start: int
    stop: int


def documents_of(texts: Sequence[Text]) -> list[Document]:
    """All documents, in the order given; files of a folder, and of those below, in the order of their names.

    Hidden files are left out.

    Raises:
        ConfigError: There are none, or a path is neither file nor folder.
    """
    found: list[Document] = []
    for number, text in enumerate(texts):
        if isinstance(text, bytes):
            found.append(Document(f"{number}", text, len(text), 0))
            continue
        path = Path(text).expanduser()
        if path.is_dir():
            found += [_file(file, f"{number}/{file.relative_to(path).as_posix()}") for file in _files(path)]
        elif path.is_file():
            found.append(_file(path, f"{number}/{path.name}"))
        else:
            raise ConfigError(f"{path} is neither a file nor a folder: give text files, or folders that have some")
    if not any(document.size_bytes for document in found):
        raise ConfigError(f"there is no text in {', '.join(_short(text) for text in texts) or 'nothing'}")
    return found


def deal(sizes: Sequence[int], *, shard_bytes: int) -> list[list[Block]]:
    """Blocks of each shard.

    A shard ends once it has ``shard_bytes`` of text; a document goes on in the next one only where it is longer than a
    block. Empty documents have no blocks.

    Args:
        sizes: Of the documents, in bytes.
        shard_bytes: Of text a shard, at least; the last may have less.
    """
    shards: list[list[Block]] = [[]]
    held = 0
    for document, size in enumerate(sizes):
        for start in range(0, size, BLOCK_BYTES):
            if held >= shard_bytes:
                shards.append([])
                held = 0
            block = Block(document, start, min(start + BLOCK_BYTES, size))
            shards[-1].append(block)
            held += block.stop - block.start
    return shards


def read_block(document: Document, block: Block) -> bytes:
    """A block's text. Between blocks a document is cut after a line, else between two characters."""
    start, stop = _moved(document, block.start), _moved(document, block.stop)
    return document.read(start, stop)


def _moved(document: Document, cut: int) -> int:
    """A cut, moved back to the end of a line or a character; the same whichever of its two blocks asks."""
    if cut in (0, document.size_bytes):
        return cut
    first = cut - _LOOK_BACK_BYTES
    before = document.read(first, cut + 1)  # the byte after the cut says whether a character goes on
    line_end = before.rfind(b"\n", 0, -1)
    if line_end >= 0:
        return first + line_end + 1
    for back in range(4):
        if before[-1 - back] & 0xC0 != 0x80:
            return cut - back
    return cut  # not UTF-8: bytes are encoded one by one


def _file(path: Path, name: str) -> Document:
    status = path.stat()
    return Document(name, path, status.st_size, status.st_mtime_ns)


def _files(folder: Path) -> list[Path]:
    found = [
        (file.relative_to(folder).as_posix(), file)
        for file in folder.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]
    return [file for _, file in sorted(found)]


def _short(text: Text) -> str:
    return f"{len(text)} bytes" if isinstance(text, bytes) else os.fspath(text)
