"""What ranks print: to this process's own output, each line with the rank's name before it, and to files.

A line is written in one piece, so that lines of several ranks do not mix. A carriage return ends a piece as well:
progress bars go on redrawing one line.
"""

from __future__ import annotations

import os
import re
import selectors
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

from lightning_dist.errors import LaunchError

_READ_BYTES = 1 << 16
_LINE_BYTES = 1 << 20  # a line without an end is written once it is so long
_PIECE = re.compile(rb"[^\r\n]*(?:\r?\n|\r(?!\Z))")  # a \r at the end may have its \n still to come


class Descriptors(NamedTuple):
    """What a rank prints into."""

    stdout: int
    stderr: int


@dataclass
class _Stream:
    prefix: bytes
    target: int
    log: BinaryIO | None
    rest: bytes = b""


def split_pieces(data: bytes) -> tuple[list[bytes], bytes]:
    """Cut into lines with their ends (line feed, carriage return or both), and what has no end yet."""
    pieces = [match.group() for match in _PIECE.finditer(data)]
    return pieces, data[sum(map(len, pieces)) :]


class Output:
    """Copies what ranks print, in a thread of its own, from :meth:`open` to the end of a ``with`` statement.

    Args:
        with_prefix: Write the rank's name before each line.
        logs: Folder for files, one a rank and round; ``None``: no files.
        stdout: Descriptor to which standard outputs are copied.
        stderr: Likewise for errors.

    Raises:
        LaunchError: The folder for files cannot be made.
    """

    def __init__(self, *, with_prefix: bool = True, logs: Path | None = None, stdout: int = 1, stderr: int = 2) -> None:
        self._with_prefix = with_prefix
        self._logs = logs
        self._targets = Descriptors(stdout, stderr)
        if logs is not None:
            try:
                logs.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LaunchError(f"--logs {logs} cannot be made: {error.strerror}; name another folder") from error
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._streams: dict[str, list[_Stream]] = {}  # by the rank's name
        self._logging = threading.Lock()  # held while a stream's file is used or becomes another
        self._thread = threading.Thread(target=self._copy, name="hierdist-output", daemon=True)

    def __enter__(self) -> Output:
        return self

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def of_rank(self, name: str, log: str) -> Iterator[Descriptors]:
        """What a rank is to print into; the descriptors are closed at the end of the ``with``: the rank has its own.

        Args:
            name: Stands before each line.
            log: Path of its file in the folder for files. Where it cannot be made, there is none: a full disk ends no
                training.
        """
        if not self._with_prefix and self._logs is None:
            yield self._targets
            return
        prefix = f"[{name}] ".encode() if self._with_prefix else b""
        writers = []
        self._streams[name] = []
        for target in self._targets:
            reader, writer = os.pipe()
            stream = _Stream(prefix, target, self._open_log(log))
            self._streams[name].append(stream)
            self._selector.register(reader, selectors.EVENT_READ, stream)
            writers.append(writer)
        os.write(self._wake_write, b"+")  # a selector that waits may not see what is added
        try:
            yield Descriptors(*writers)
        finally:
            for writer in writers:
                os.close(writer)

    def go_on(self, name: str, log: str) -> None:
        """What a rank prints goes to another file from now on.

        Args:
            name: As it was given to :meth:`of_rank`.
            log: Path of the file in the folder for files.
        """
        for stream in self._streams.get(name, ()):
            with self._logging:
                if stream.log is not None:  # else it has closed its end, or there are no files
                    stream.log.close()
                    stream.log = self._open_log(log)

    def _open_log(self, log: str) -> BinaryIO | None:
        if self._logs is None:
            return None
        path = self._logs / log
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("ab", buffering=0)
        return None

    def close(self) -> None:
        """Copy what was printed by now, and end. Safe to call twice."""
        if self._wake_write < 0:
            return
        os.close(self._wake_write)
        self._wake_write = -1
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._wake_read)
        for key in list(self._selector.get_map().values()):
            if key.data is not None:  # the thread was never started
                os.close(key.fd)
        self._selector.close()

    def _copy(self) -> None:
        is_closing = False
        while True:
            ready = self._selector.select(0 if is_closing else None)
            for key, _ in ready:
                if key.data is None:
                    if not os.read(self._wake_read, _READ_BYTES):
                        is_closing = True
                        self._selector.unregister(self._wake_read)
                elif not self._copy_some(key.fd, key.data):
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
            if is_closing and not ready:
                break
        for key in list(self._selector.get_map().values()):  # something that a rank has started still holds its end
            self._write(key.data, [key.data.rest] if key.data.rest else [])
            self._end(key.data)
            self._selector.unregister(key.fd)
            os.close(key.fd)

    def _copy_some(self, descriptor: int, stream: _Stream) -> bool:
        """Copy what is there; whether there may be more."""
        data = os.read(descriptor, _READ_BYTES)
        pieces, rest = split_pieces(stream.rest + data)
        if rest and (not data or len(rest) > _LINE_BYTES):
            pieces.append(rest if rest.endswith(b"\r") else rest + b"\n")
            rest = b""
        stream.rest = rest
        self._write(stream, pieces)
        if not data:
            self._end(stream)
        return bool(data)

    def _write(self, stream: _Stream, pieces: list[bytes]) -> None:
        if not pieces:
            return
        with self._logging, suppress(OSError):
            if stream.log is not None:
                stream.log.write(b"".join(pieces))
        text = memoryview(b"".join(stream.prefix + piece for piece in pieces))
        with suppress(OSError):  # nobody reads any more
            while text:
                text = text[os.write(stream.target, text) :]

    def _end(self, stream: _Stream) -> None:
        with self._logging:
            if stream.log is not None:
                stream.log.close()
                stream.log = None
