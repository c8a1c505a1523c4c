"""The seam: what is written is there; what may pass is tried again; what does not is said, with place and reason."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

from lightning_dist.checkpoint import local_disk
from lightning_dist.checkpoint.catalog import newest
from lightning_dist.checkpoint.sharded import load, save
from lightning_dist.checkpoint.storage import Folder, open_folder
from lightning_dist.errors import CheckpointError, StorageError
from lightning_dist.retry import Retry
from tests.support.saves import save_by_ranks


@pytest.fixture(params=["path", "file", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    urls = {"path": str(tmp_path / "a/b"), "file": f"file://{tmp_path}/a/b", "memory": "memory://storage-test/a/b"}
    yield open_folder(urls[request.param])
    memory = fsspec.filesystem("memory")
    if memory.exists("/storage-test"):
        memory.rm("/storage-test", recursive=True)


def test_the_five_operations(folder: Folder) -> None:
    assert folder.list() == {}
    assert folder.read("x") is None
    folder.remove("x")
    folder.write("x", [b"ab", memoryview(b"cdef"), b"", bytearray(b"g")])
    folder.child("sub").write("y", [])
    assert folder.list() == {"x": 7, "sub": None}
    assert folder.read("x") == b"abcdefg"
    target = memoryview(bytearray(3))
    folder.read_into("x", 2, target)
    assert bytes(target) == b"cde"
    folder.write("x", [b"new"])
    assert folder.read("x") == b"new"
    folder.child("sub").remove("y")
    folder.remove("sub")
    folder.remove("x")
    assert folder.list() == {}


def test_what_is_too_short_or_missing_is_said(folder: Folder) -> None:
    folder.write("x", [b"abc"])
    with pytest.raises(StorageError, match=r"cannot read .*x.*ends at byte 3, 5 were expected"):
        folder.read_into("x", 1, memoryview(bytearray(4)))
    with pytest.raises(StorageError, match=r"cannot read .*gone"):
        folder.read_into("gone", 0, memoryview(bytearray(4)))


def test_urls_stay_as_they_were_given() -> None:
    for url in ("memory://a/b?x=1", "memory:///a//b", "memory://a/b/"):
        assert open_folder(url).url == url
    assert open_folder("memory://a/b").child("c").url == "memory://a/b/c"
    assert open_folder("relative/path").url == "relative/path"
    with pytest.raises(CheckpointError, match="nosuch://x cannot be opened"):
        open_folder("nosuch://x")


def test_many_small_and_some_large_buffers(tmp_path: Path) -> None:
    parts = [bytes([i % 251]) * (i % 7) for i in range(3000)] + [os.urandom(9 << 20), b"end"]
    open_folder(tmp_path).write("x", parts)
    assert (tmp_path / "x").read_bytes() == b"".join(parts)


def test_a_remote_file_whose_write_failed_is_not_there() -> None:
    folder = open_folder("memory://half", retry=Retry(attempts=1))

    def parts() -> Iterator[bytes]:
        yield b"begun"
        raise PermissionError("lost")

    with pytest.raises(StorageError, match="lost"):
        folder.write("x", parts())
    assert folder.read("x") is None


def test_a_remote_write_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFile

    true_write, calls = MemoryFile.write, []

    def write(self: MemoryFile, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) == 2:
            raise ConnectionResetError("reset")
        return int(true_write(self, data))

    monkeypatch.setattr(MemoryFile, "write", write)
    folder = open_folder("memory://again", retry=Retry(sleep=lambda s: None))
    state = {"a": torch.arange(100.0), "b": torch.arange(7)}
    save({**state}, folder, rank=0, host="h")
    target = {"a": torch.zeros(100), "b": torch.zeros(7, dtype=torch.int64)}
    load(target, folder)
    assert torch.equal(target["a"], state["a"])


@pytest.mark.parametrize(
    ("number", "said"), [(errno.ENOSPC, "No space left.*make room"), (errno.EACCES, "denied"), (errno.EIO, "error")]
)
@pytest.mark.parametrize("at", range(1, 7))
def test_a_disk_that_fails_at_any_write_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str, at: int
) -> None:
    root = open_folder(tmp_path)
    save_by_ranks([{"w": torch.ones(100)}] * 2, root.child("a"), record={"step": 1})
    true_writev, count = os.writev, iter(range(1, 1000))

    def writev(descriptor: int, buffers: list[memoryview]) -> int:
        if next(count) >= at:
            raise OSError(number, os.strerror(number))
        return true_writev(descriptor, [memoryview(buffers[0])[:7]])  # a short write, as disks that are nearly full do

    monkeypatch.setattr(local_disk.os, "writev", writev)
    with pytest.raises(StorageError, match=f"cannot write .*{said}"):
        save_by_ranks([{"w": torch.zeros(100)}] * 2, root.child("b"), record={"step": 2})
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="b has no COMMITTED"):
        found = newest(root, full=True)
    assert found is not None
    assert found.manifest.record == {"step": 1}


def test_an_error_of_the_flush_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(local_disk.os, "fdatasync", fail)
    monkeypatch.setattr(local_disk, "_FLUSH_BYTES", 1)
    with pytest.raises(StorageError, match=r"cannot write .*x"):
        open_folder(tmp_path).write("x", [os.urandom(6 << 20)] * 3)


def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"cannot write .*file/c"):
        open_folder(tmp_path / "file/c").write("x", [b"1"])
