"""Folders of data sets: what they read and list, what is said when they cannot, what is kept secret."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import pytest

from lightning_dist.data.reading import ReadFolder
from lightning_dist.data.storage.shards import _SERVER_VARIABLES, _joined, open_read_folder, with_sleep
from lightning_dist.errors import ForeignDataError, UnreadableShardError
from lightning_dist.retry import Retry

FILES = {"index.json": b"{}", "a/0.bin": bytes(range(100)), "a/b/1.bin": b"", "z.bin": b"z" * 10}


@pytest.fixture(params=["path", "file", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ReadFolder]:
    url = {"path": str(tmp_path / "d"), "file": f"file://{tmp_path}/d", "memory": "memory://shards-test/d"}
    for name, data in FILES.items():
        if request.param == "memory":
            fsspec.filesystem("memory").pipe_file(f"/shards-test/d/{name}", data)
        else:
            (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "d" / name).write_bytes(data)
    yield open_read_folder(url[request.param])
    memory = fsspec.filesystem("memory")
    if memory.exists("/shards-test"):
        memory.rm("/shards-test", recursive=True)


def test_what_a_folder_holds(folder: ReadFolder) -> None:
    assert folder.sizes() == {"a/0.bin": 100, "a/b/1.bin": 0, "index.json": 2, "z.bin": 10}
    assert list(folder.sizes()) == sorted(FILES)
    assert {name: folder.read(name) for name in FILES} == FILES
    assert folder.read("nothing") is None
    assert folder.read_range("a/0.bin", 10, 5) == bytes([10, 11, 12, 13, 14])
    assert folder.read_range("a/0.bin", 100, 0) == b""
    path = folder.local_path("a/0.bin")
    assert (path is None) if folder.url.startswith("memory") else (path is not None and path.read_bytes()[3] == 3)


def test_a_copy_for_another_process(folder: ReadFolder) -> None:
    copy = pickle.loads(pickle.dumps(folder))
    assert copy.url == folder.url
    assert copy.read_range("z.bin", 0, 3) == b"zzz"


def test_what_cannot_be_read_names_file_and_bytes(folder: ReadFolder) -> None:
    short = r"cannot read bytes 90 to 110 of .*d/a/0\.bin: only 10 bytes of 20 are there; it is cut short"
    with pytest.raises(UnreadableShardError, match=short):
        folder.read_range("a/0.bin", 90, 20)
    with pytest.raises(UnreadableShardError, match=r"cannot read bytes 0 to 1 of .*d/gone: FileNotFoundError"):
        folder.read_range("gone", 0, 1)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnreadableShardError, match=r"cannot list .*/none: FileNotFoundError"):
        open_read_folder(tmp_path / "none").sizes()
    assert open_read_folder("memory://shards-test/none").sizes() == {}
    with pytest.raises(ForeignDataError, match=r"nosuch://x cannot be opened"):
        open_read_folder("nosuch://x")


def test_what_may_pass_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    waits: list[float] = []
    folder = open_read_folder("memory://shards-test/d", retry=Retry(sleep=waits.append))
    answers: list[Any] = [ConnectionResetError("reset"), TimeoutError(), b"data"]

    def cat_file(self: MemoryFileSystem, path: str, start: int | None = None, end: int | None = None) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bytes(answer)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    assert folder.read_range("x", 0, 4) == b"data"
    assert waits == [0.5, 1.0]
    answers[:] = [PermissionError(errno.EACCES, "denied")]
    with pytest.raises(UnreadableShardError, match=r"cannot read bytes 0 to 4 of memory://shards-test/d/x: Permission"):
        folder.read_range("x", 0, 4)
    answers[:] = [b"more than that"]
    with pytest.raises(UnreadableShardError, match=r"sent 14 bytes instead of 4; it has no byte ranges"):
        folder.read_range("x", 0, 4)


def test_waits_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    def cat_file(self: MemoryFileSystem, path: str, **options: Any) -> bytes:
        raise ConnectionResetError("reset")

    def stop(wait_s: float) -> None:
        raise InterruptedError(f"after {wait_s}")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    folder = with_sleep(open_read_folder("memory://shards-test/d"), stop)
    with pytest.raises(InterruptedError, match=r"after 0\.5"):
        folder.read_range("x", 0, 4)


def test_secrets_of_a_url_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.core

    class Server:
        storage_options: ClassVar[dict[str, Any]] = {}

        def cat_file(self, path: str, **options: Any) -> bytes:
            raise PermissionError(f"not you: {path}")

    given = "https://me:pass%21word@host/data?sig=abc%2F"
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url, **options: (Server(), url))
    folder = open_read_folder(given)
    assert folder.url == "https://me:***@host/data?***"
    with pytest.raises(UnreadableShardError, match=r"https://me:\*\*\*@host/data/0\.bin\?\*\*\*: Perm") as caught:
        folder.read_range("0.bin", 0, 1)
    assert "abc" not in str(caught.value)
    assert "pass" not in str(caught.value)
    assert caught.value.__cause__ is None
    with pytest.raises(ForeignDataError, match=r"files on a web server cannot be listed"):
        folder.sizes()


@pytest.mark.parametrize(
    ("folder", "joined"),
    [
        ("s3://bucket/a/", "s3://bucket/a/x/0.bin"),
        ("bucket/what?", "bucket/what?/x/0.bin"),
        ("https://host/a?key=1", "https://host/a/x/0.bin?key=1"),
        ("simplecache::s3://bucket/a", "simplecache::s3://bucket/a/x/0.bin"),
        ("zip://a::s3://bucket/b.zip", "zip://a/x/0.bin::s3://bucket/b.zip"),
    ],
)
def test_files_of_a_folder(folder: str, joined: str) -> None:
    assert _joined(folder, "x/0.bin") == joined


def test_a_child_opens_the_file_system_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.core

    opened: list[int] = []
    true_open = fsspec.core.url_to_fs

    def url_to_fs(url: str, **options: Any) -> Any:
        opened.append(os.getpid())
        return true_open(url, **options)

    monkeypatch.setattr(fsspec.core, "url_to_fs", url_to_fs)
    fsspec.filesystem("memory").pipe_file("/shards-fork/x", b"1")
    folder = open_read_folder("memory://shards-fork")
    assert folder.read("x") == b"1"
    assert folder.read("x") == b"1"
    assert len(opened) == 1
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as in a forked child
    assert folder.read("x") == b"1"
    assert opened[1:] == [-1]
    fsspec.filesystem("memory").rm("/shards-fork", recursive=True)


def test_links_in_a_circle_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "0.bin").write_bytes(b"123")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "again").symlink_to(tmp_path)
    assert open_read_folder(tmp_path).sizes() == {"0.bin": 3}


def test_the_same_url_at_another_server_is_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache tells folders apart by it; keys that are renewed are no part of it."""
    import fsspec.core

    def url_to_fs(url: str, **options: Any) -> Any:
        return SimpleNamespace(storage_options=options), url

    monkeypatch.setattr(fsspec.core, "url_to_fs", url_to_fs)
    for name in _SERVER_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def origin(**options: Any) -> str:
        return open_read_folder("s3://bucket/data/", storage_options=options).origin

    one = origin(endpoint_url="http://one:9000", key="me", secret="key-1", client_kwargs={"verify": False})
    assert one == origin(endpoint_url="http://one:9000", key="me", secret="key-2", anon=False)
    assert one == origin(endpoint_url="http://user:key-3@one:9000")
    others = [
        one,
        origin(),
        origin(endpoint_url="http://two:9000"),
        origin(client_kwargs={"endpoint_url": "http://two:9000", "aws_secret_access_key": "key-4"}),
    ]
    assert origin() == "s3://bucket/data"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://three:9000")
    others.append(origin())
    assert len(set(others)) == len(others)
    assert not any("key-" in other for other in others)
