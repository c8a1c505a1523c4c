"""Shards on a web server that is slow, busy, breaks off, or knows no byte ranges."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="aiohttp, which fsspec reads web servers with, is not installed")

from lightning_dist.data.cache.cached_chunks import CacheOptions, open_chunks
from lightning_dist.data.index.dataset_index import DatasetIndex
from lightning_dist.data.storage.shards import open_read_folder
from lightning_dist.errors import DataError
from lightning_dist.retry import Retry
from tests.support.ranks import RankContext, RankPool
from tests.support.stored import StoredFolder, read_chunk, store, stored_chunk

SIZE = 20_000
# The client's threads and connections outlast a call, so each test runs in processes of its own.
CALL = {"init_group": False, "fresh": True, "env": {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}}


class WebServer(ThreadingHTTPServer):
    """Serves a folder, in byte ranges; ``plan`` says what happens to the first requests for bytes."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.plan: list[str] = []
        self.ranges: list[tuple[str, str]] = []
        self.guard = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/data"

    def sent(self) -> list[tuple[str, str]]:
        """Ranges that were sent whole."""
        with self.guard:
            return sorted(self.ranges)


class _Handler(BaseHTTPRequestHandler):
    server: WebServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.server.folder / self.path.partition("?")[0].removeprefix("/data/")
        if not path.exists():
            self.send_error(404)
            return
        asked = self.headers.get("Range", "")
        with self.server.guard:
            fate = self.server.plan.pop(0) if self.server.plan and asked else "fine"
        if fate.isdigit():
            self.send_error(int(fate))
            return
        data, status = path.read_bytes(), 200
        if asked and fate != "whole":
            first, last = asked.removeprefix("bytes=").split("-")
            data, status = data[int(first) : int(last) + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if fate == "broken":
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return
        self.wfile.write(data)
        with self.server.guard:
            self.server.ranges.append((path.name, asked))

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WebServer]:
    (tmp_path / "data").mkdir()
    with WebServer(tmp_path / "data") as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def read_all(context: RankContext, url: str, data: StoredFolder, index: DatasetIndex, root: Path) -> list[float]:
    folder = open_read_folder(url, retry=Retry(first_wait_s=0.01))
    counts: dict[str, float] = {}

    def count(name: str, value: float) -> None:
        counts[name] = counts.get(name, 0) + value

    chunks = open_chunks(folder, index, options=CacheOptions(folder=root), count=count)
    try:
        chunks.expect(map(index.chunk, range(index.num_chunks)))
        for number in range(index.num_chunks):
            assert read_chunk(chunks, index, number) == stored_chunk(data.folder, index, number)
    finally:
        chunks.close()
    return [counts.get("data.shared_bytes", 0), counts.get("data.cache_bytes", 0)]


def test_a_server_that_is_busy_and_breaks_off_is_asked_again(
    ranks: RankPool, server: WebServer, tmp_path: Path
) -> None:
    index = store(server.folder, num_shards=2, chunks_per_shard=4, chunk_bytes=SIZE)
    server.plan = ["503", "fine", "broken", "429", "fine", "500", "broken"]
    args = (server.url, StoredFolder(server.folder, tmp_path / "log"), index, tmp_path / "cache")
    shares = ranks.run(read_all, world_size=2, args=args, **CALL)  # type: ignore[arg-type]
    ranges = [f"bytes={start}-{start + SIZE - 1}" for start in range(0, 4 * SIZE, SIZE)]
    assert server.sent() == sorted((name, part) for name in ("0.bin", "1.bin") for part in ranges)
    assert server.plan == []
    assert sum(share[0] for share in shares) == 8 * SIZE
    assert sum(map(sum, shares)) == 2 * 8 * SIZE


def find_errors(context: RankContext, url: str, index: DatasetIndex) -> list[str]:
    folder = open_read_folder(url, retry=Retry(attempts=2, first_wait_s=0.01))
    said = [str(folder.read("nothing")), str(len(folder.read("0.bin") or b""))]
    for attempt in (
        lambda: folder.read_range("0.bin", 0, SIZE),
        lambda: folder.read_range("0.bin", 0, SIZE),
        lambda: folder.read_range("gone.bin", 0, SIZE),
        folder.sizes,
    ):
        try:
            attempt()
            said.append("fine")
        except DataError as error:
            said.append(f"{type(error).__name__} {error}")
    return said


def test_what_a_server_cannot_give_is_said(ranks: RankPool, server: WebServer) -> None:
    index = store(server.folder, num_shards=1, chunks_per_shard=2, chunk_bytes=SIZE)
    server.plan = ["403", "whole"]
    url = f"{server.url}?signature=secret"
    said = ranks.run(find_errors, world_size=1, args=(url, index), **CALL)[0]  # type: ignore[arg-type]
    assert said[:2] == ["None", str(2 * SIZE)]
    assert said[2].startswith(f"UnreadableShardError cannot read bytes 0 to {SIZE} of {server.url}/0.bin?***: Client")
    assert "403" in said[2]
    assert f"sent {2 * SIZE} bytes instead of {SIZE}; it has no byte ranges" in said[3]
    assert "gone.bin?***: FileNotFoundError" in said[4]
    assert said[5].startswith("ForeignDataError")
    assert "secret" not in "".join(said)


def close_while_waiting(context: RankContext, url: str, index: DatasetIndex, root: Path) -> list[str]:
    """The server is busy for long; whoever closes the chunks does not wait for the next try."""
    folder = open_read_folder(url, retry=Retry(first_wait_s=300.0, longest_wait_s=300.0))
    chunks = open_chunks(folder, index, options=CacheOptions(folder=root, threads=1))
    chunks.expect([index.chunk(0)])
    part = root / "fetching"
    while not any(path.suffix == ".part" for path in part.iterdir()):
        threading.Event().wait(0.01)
    chunks.close()
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("hierdist")]
    return threads + [path.name for path in part.iterdir()]


def test_closing_ends_the_wait_for_another_try(ranks: RankPool, server: WebServer, tmp_path: Path) -> None:
    index = store(server.folder, num_shards=1, chunks_per_shard=1, chunk_bytes=SIZE)
    server.plan = ["503"] * 9
    args = (server.url, index, tmp_path / "cache")
    assert ranks.run(close_while_waiting, world_size=1, args=args, **CALL) == [[]]  # type: ignore[arg-type]
