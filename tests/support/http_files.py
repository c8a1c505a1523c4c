"""A folder served over HTTP, and as buckets of an S3 store that anybody may read; standard library only.

Run as ``python -I -S http_files.py FOLDER ADDRESS`` by :class:`tests.support.http_store.HttpStore`; it prints its port.
A path ``/a/b`` is the file ``FOLDER/a/b``, or the object ``b`` of bucket ``a``. Bytes go from the file to the socket
inside the kernel, so that a loopback or an unshaped link is filled by a fraction of a core. ``GET /?counted`` tells
what was served.
"""

from __future__ import annotations

import contextlib
import email.utils
import json
import os
import re
import sys
import threading
import urllib.parse
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO
from xml.sax.saxutils import escape

COUNTED = "counted"


class FileServer(ThreadingHTTPServer):
    """Serves a folder.

    Args:
        folder: What it serves.
        address: Where it listens, on a port that the kernel chooses.
    """

    request_queue_size = 128

    def __init__(self, folder: Path, address: str) -> None:
        super().__init__((address, 0), _Request)
        self.folder = folder.resolve()
        self._lock = threading.Lock()
        self._served: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()

    def count(self, path: str, size_bytes: int, *, requests: int = 1) -> None:
        """A file was asked for, and so many bytes of it are sent."""
        with self._lock:
            self._served[path] += size_bytes
            self._requests[path] += requests

    def counted(self) -> dict[str, object]:
        """What was sent so far: by file, and by the link."""
        with self._lock:
            return {"served": dict(self._served), "requests": dict(self._requests), "link_bytes": _link_bytes()}


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FileServer

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        """Nothing: standard output has the port, and standard error what goes wrong."""

    def _answer(self, *, with_body: bool) -> None:
        asked = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(asked.query, keep_blank_values=True)
        path = urllib.parse.unquote(asked.path).strip("/")
        if COUNTED in query:
            return self._text(200, json.dumps(self.server.counted()), "application/json", with_body=with_body)
        place = (self.server.folder / path).resolve()
        if not place.is_relative_to(self.server.folder):
            return self._missing(path, with_body=with_body)
        if "list-type" in query and place.is_dir():
            listing = _listing(place, query.get("prefix", [""])[0], query.get("delimiter", [""])[0])
            return self._text(200, listing, "application/xml", with_body=with_body)
        try:
            file = open(place, "rb")  # noqa: SIM115 - closed by the next line
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return self._missing(path, with_body=with_body)
        with file:
            return self._file(path, file, with_body=with_body)

    def _file(self, path: str, file: BinaryIO, *, with_body: bool) -> None:
        found = os.fstat(file.fileno())
        part = _part(self.headers.get("Range"), found.st_size)
        if part is None:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{found.st_size}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start, size_bytes = part
        self.send_response(206 if self.headers.get("Range") else 200)
        if self.headers.get("Range"):
            self.send_header("Content-Range", f"bytes {start}-{start + size_bytes - 1}/{found.st_size}")
        self.send_header("Content-Length", str(size_bytes))
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Last-Modified", email.utils.formatdate(found.st_mtime, usegmt=True))
        self.send_header("ETag", f'"{found.st_mtime_ns:x}-{found.st_size:x}"')
        self.end_headers()
        if not with_body:
            return
        self.server.count(path, size_bytes)  # before, so that who has all of it finds it counted
        try:
            if size_bytes:
                self.connection.sendfile(file, start, size_bytes)
        except (BrokenPipeError, ConnectionResetError):
            self.server.count(path, file.tell() - start - size_bytes, requests=0)  # sendfile stays where it stopped
            self.close_connection = True

    def _missing(self, path: str, *, with_body: bool) -> None:
        text = f"<Error><Code>NoSuchKey</Code><Message>{escape(path)} is not here</Message></Error>"
        self._text(404, text, "application/xml", with_body=with_body)

    def _text(self, status: int, text: str, kind: str, *, with_body: bool) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", kind)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def _part(header: str | None, size_bytes: int) -> tuple[int, int] | None:
    """First byte and number of bytes of a ``Range`` header; ``None`` if the file has no such part."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "bytes=0-")
    if match is None or not any(match.groups()):
        return None
    first, last = match.groups()
    if not first:
        start = max(0, size_bytes - int(last))
        return start, size_bytes - start
    start = int(first)
    end = min(size_bytes, int(last) + 1) if last else size_bytes
    if start >= end and not (start == end == 0 and header is None):
        return None
    return start, end - start


def _listing(bucket: Path, prefix: str, delimiter: str) -> str:
    """All objects of a bucket whose names begin with a prefix, in one answer of S3's ListObjectsV2."""
    folders: set[str] = set()
    lines = []
    for place in sorted(bucket.rglob("*")):
        name = place.relative_to(bucket).as_posix()
        if not place.is_file() or not name.startswith(prefix):
            continue
        rest = name[len(prefix) :]
        if delimiter and delimiter in rest:
            folders.add(prefix + rest[: rest.index(delimiter) + 1])
            continue
        found = place.stat()
        changed = email.utils.formatdate(found.st_mtime, usegmt=True)
        when = email.utils.parsedate_to_datetime(changed).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        lines.append(
            f"<Contents><Key>{escape(name)}</Key><LastModified>{when}</LastModified>"
            f'<ETag>"{found.st_mtime_ns:x}-{found.st_size:x}"</ETag><Size>{found.st_size}</Size>'
            "<StorageClass>STANDARD</StorageClass></Contents>"
        )
    lines += [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)]
    return (
        '<?xml version="1.0" encoding="UTF-8"?>'
        '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{escape(bucket.name)}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(lines)}</KeyCount>"
        f"<MaxKeys>{max(1000, len(lines))}</MaxKeys><IsTruncated>false</IsTruncated>{''.join(lines)}"
        "</ListBucketResult>"
    )


def _link_bytes() -> int:
    """Bytes this namespace's link has sent, headers included; 0 where there is no such link."""
    with contextlib.suppress(FileNotFoundError):
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == "eth0":
                return int(counters.split()[8])
    return 0


def main(argv: list[str]) -> None:
    """Serve until killed."""
    server = FileServer(Path(argv[1]), argv[2])
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv)
