"""A process that keeps files: they outlive who wrote them, are bounded, and only their owner gets at them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from lightning_dist import wire
from lightning_dist.checkpoint.catalog import newest, open_checkpoint
from lightning_dist.checkpoint.keeper import client
from lightning_dist.checkpoint.keeper.client import Endpoint, Keeper, Line
from lightning_dist.checkpoint.keeper.folder import KeptFolder
from lightning_dist.checkpoint.keeper.kept_file import room_for
from lightning_dist.checkpoint.keeper.memory import FullError, KeptFiles
from lightning_dist.errors import DamagedCheckpointError, StorageError
from tests.support.keepers import LIMIT_BYTES, ended, keeping
from tests.support.saves import every_type, load_on_rank, same, save_by_ranks, zeros_like


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    with keeping() as keeper:
        yield keeper


def remote(keeper: Keeper, *, secret: bytes | None = None) -> Keeper:
    """As another host would call it."""
    about = keeper.about()
    own = bytes.fromhex(about["secret"]) if secret is None else secret
    port = keeper.listen("127.0.0.1")
    return Keeper(Endpoint(about["identity"], address="127.0.0.1", port=port, secret=own), timeout_s=20)


# -- what it holds -----------------------------------------------------------------------------------------------------


def parts(*texts: bytes) -> Iterator[memoryview]:
    return map(memoryview, texts)


def test_files_are_counted_and_bounded() -> None:
    files = KeptFiles(10)
    assert files.write("a", "x", parts(b"12", b"345")) == 5
    assert files.write("a", "x", parts(b"123")) == 3
    assert files.used_bytes == 3
    files.write("b", "y", parts(b"12345"))
    files.write("c", "z", parts(b"123", b"45"))  # the oldest goes
    assert files.folders() == ("b", "c")
    assert files.used_bytes == 10
    with pytest.raises(FullError, match="5 of 10 bytes are used, and 9 more are needed"):
        files.write("c", "w", parts(b"123456789"))
    assert (files.folders(), files.used_bytes, files.list("c")) == (("c",), 5, {"z": 5})
    files.set_limit(4)
    assert (files.folders(), files.used_bytes) == ((), 0)


def test_a_file_that_is_not_whole_is_not_there_and_not_counted() -> None:
    files = KeptFiles(100)

    def broken() -> Iterator[memoryview]:
        yield memoryview(b"123")
        raise ConnectionError

    files.write("a", "x", parts(b"old"))
    with pytest.raises(ConnectionError):
        files.write("a", "x", broken())
    assert (files.list("a"), files.used_bytes) == ({"x": 3}, 3)
    with files.reading("a", "x") as opened:
        assert opened is not None
        files.keep(None)
        assert (files.folders(), files.used_bytes) == ((), 0)
        assert os.pread(opened[0], 10, 0) == b"old"  # who reads, reads on
    with files.reading("a", "x") as opened:
        assert opened is None


def filling(data: bytes) -> Callable[[memoryview], None]:
    def fill(view: memoryview) -> None:
        view[:] = data

    return fill


def read_all(files: KeptFiles, folder: str, name: str) -> bytes:
    with files.reading(folder, name) as opened:
        assert opened is not None
        return os.pread(opened[0], opened[1], 0)


def test_memory_of_what_was_dropped_is_filled_again_unless_somebody_reads_it() -> None:
    room = room_for(1)
    files = KeptFiles(2 * room)
    files.fill("a", "x", 3, filling(b"old"))
    with files.reading("a", "x") as opened:
        assert opened is not None
        files.fill("b", "y", 2, filling(b"b1"))
        files.keep("b")
        files.fill("c", "y", 2, filling(b"c1"))
        assert os.pread(opened[0], opened[1], 0) == b"old"
    assert (files.folders(), files.used_bytes) == (("b", "c"), 2 * room)
    files.keep("c")
    assert files.used_bytes == 2 * room  # that of b waits
    files.fill("d", "y", 4, filling(b"more"))
    assert (read_all(files, "c", "y"), read_all(files, "d", "y")) == (b"c1", b"more")
    assert files.used_bytes == 2 * room
    files.write("e", "z", parts(b"1"))  # what waits, and then the oldest, makes room
    assert files.folders() == ("d", "e")
    with pytest.raises(FullError):
        files.fill("f", "y", 3 * room, filling(b""))
    files.keep(None)
    assert files.used_bytes == 0


def test_a_file_that_is_not_filled_is_not_there_and_not_counted() -> None:
    files = KeptFiles(1 << 20)

    def broken(view: memoryview) -> None:
        raise ConnectionError

    for size in (1, 100_000):
        with pytest.raises(ConnectionError):
            files.fill("a", "x", size, broken)
    assert (files.list("a"), files.used_bytes) == ({}, 0)


def handed_over(data: bytes) -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, data)
    return descriptor


def test_memory_that_was_handed_over_is_a_file(keeper: Keeper) -> None:
    descriptor = handed_over(b"0123456789")
    line = Line(keeper)
    try:
        assert line.put("a", "x", descriptor, 7).used_bytes == 10
        assert keeper.read("a", "x") == b"0123456"
        with pytest.raises(StorageError, match="11 bytes of 10"):
            line.put("a", "y", descriptor, 11)
        os.close(descriptor)
        descriptor = handed_over(bytes(LIMIT_BYTES + 1))
        with pytest.raises(StorageError, match="more are needed"):
            line.put("a", "y", descriptor, 7)
    finally:
        os.close(descriptor)
        line.close()


def test_a_line_is_opened_again_where_it_was_lost(keeper: Keeper) -> None:
    for called in (keeper, remote(keeper)):
        line = Line(called)
        try:
            assert line.fill("a", "x", b"abcde", lists=True).files == {"x": 5}
            assert line._open is not None
            line._open.shutdown(socket.SHUT_RDWR)  # as after it has stood still for too long
            paced: list[int] = []
            line.fill_in_parts("a", "y", memoryview(b"012345678"), part_bytes=4, pace=paced.append)
            assert (line.read("a", "y"), paced) == (b"012345678", [4, 4, 1])
            line.fill("b", "z", b"", alone=True)
            assert keeper.folders() == ("b",)
            with pytest.raises(StorageError, match="more are needed"):
                line.fill("c", "z", bytes(LIMIT_BYTES + 1))
            assert "c" in line.folders()
        finally:
            line.close()


# -- the process -------------------------------------------------------------------------------------------------------


def test_the_operations_of_a_folder(keeper: Keeper) -> None:
    for keepers in ([keeper], [remote(keeper)]):
        folder = KeptFolder(keepers, "a")
        assert folder.list() == {}
        assert folder.read("x") is None
        folder.remove("x")
        folder.write("x", [b"ab", memoryview(b"cdef"), b"", bytearray(b"g")])
        folder.child("sub").write("y", [])
        assert folder.list() == {"x": 7, "sub": None}
        assert folder.read("x") == b"abcdefg"
        assert folder.child("sub").read("y") == b""
        target = memoryview(bytearray(3))
        folder.read_into("x", 2, target)
        assert bytes(target) == b"cde"
        with pytest.raises(StorageError, match=r"cannot read .*x.*ends at byte 7, 9 were expected"):
            folder.read_into("x", 5, memoryview(bytearray(4)))
        with pytest.raises(StorageError, match=r"cannot read .*gone: no keeper has it"):
            folder.read_into("gone", 0, target)
        folder.child("sub").remove("y")
        folder.remove("x")
        assert folder.list() == {}
    assert keeper.about()["used_bytes"] == 0


def test_a_checkpoint_in_memory_is_one_as_on_disk(keeper: Keeper) -> None:
    root = KeptFolder([keeper])
    state = every_type()
    save_by_ranks([{**state}] * 3, root.child("a"), record={"step": 1})
    save_by_ranks([{**state, "one": state["one"] * 2}] * 3, root.child("b"), record={"step": 2})
    found = newest(root, full=True)
    assert found is not None
    assert found.manifest.record == {"step": 2}
    loaded = load_on_rank(zeros_like(state), root.child("a"))
    for name, value in state.items():
        assert same(loaded[name], value), name
    shard = next(name for name in root.child("b").list() if name.startswith("rank00001"))
    root.child("b").remove(shard)
    with pytest.raises(DamagedCheckpointError, match=f"{shard} is missing"):
        open_checkpoint(root.child("b"))


def test_files_of_several_keepers_are_one_folder(keeper: Keeper) -> None:
    state = every_type()
    with keeping() as other:
        KeptFolder([keeper], "a").write("x", [b"1"])
        both = KeptFolder([other, keeper], "a")
        both.write("y", [b"2"])
        both.write_everywhere("z", [b"3"])
        assert both.list() == {"x": 1, "y": 1, "z": 1}
        assert keeper.list("a") == {"x": 1, "z": 1}
        assert (both.read("x"), both.read("y"), both.read("none")) == (b"1", b"2", None)
        save_by_ranks([{**state}] * 2, both.child("b"))
    assert both.list() == {"x": 1, "z": 1}  # one is gone, and with it what it had
    with pytest.raises(StorageError, match="write failed: ConnectionRefusedError"):
        both.write("y", [b"2"])


WORKER = """
import os, signal, sys
from lightning_dist.checkpoint.keeper import client
keeper = client.start(sys.argv[1], limit_bytes=1 << 26, idle_s=60)
keeper.write("a", "x", [bytes(range(256)) * 4096])
connection = keeper.attach()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_files_outlive_the_process_that_wrote_them() -> None:
    name = uuid.uuid4().hex
    worker = subprocess.run([sys.executable, "-c", WORKER, name], timeout=100, check=False)
    assert worker.returncode == -signal.SIGKILL
    keeper = client.find(name)
    assert keeper is not None
    process = psutil.Process(keeper.about()["process"])
    assert process.ppid() != os.getpid()
    assert os.getsid(process.pid) == os.getsid(process.pid) != os.getsid(0)
    assert keeper.read("a", "x") == bytes(range(256)) * 4096
    keeper.end()
    assert client.find(name) is None
    ended(process)


def test_it_needs_little_memory_and_no_torch(keeper: Keeper) -> None:
    process = psutil.Process(keeper.about()["process"])
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "torch" not in maps
    assert process.memory_info().rss < 64 << 20
    assert {os.path.realpath(f"/proc/{process.pid}/fd/{number}") for number in (0, 1, 2)} == {"/dev/null"}


def test_its_memory_is_bounded_and_given_back() -> None:
    megabyte = bytes(1 << 20)
    with keeping(limit_bytes=4 << 20) as keeper:
        process = psutil.Process(keeper.about()["process"])
        keeper.write("a", "x", [megabyte] * 3)
        with pytest.raises(StorageError, match=r"write failed: .*of 4194304 bytes are used"):
            keeper.write("a", "y", [megabyte] * 2)
        assert keeper.list("a") == {"x": 3 << 20}  # and the connection is in order: what came after was read
        for number in range(20):
            keeper.write(f"b{number}", "x", [megabyte] * 2)
        about = keeper.about()
        assert (about["used_bytes"], keeper.folders()) == (4 << 20, ("b18", "b19"))
        shared = process.memory_info().shared
        assert shared < 64 << 20
        keeper.keep("b19")
        assert keeper.about()["used_bytes"] == 2 << 20
        again = client.start(keeper.endpoint.name or "", limit_bytes=1 << 20)  # the same one, with another bound
        assert again.endpoint.identity == keeper.endpoint.identity
        assert keeper.folders() == ()


def test_many_start_it_and_one_runs() -> None:
    name = uuid.uuid4().hex
    found: list[Keeper] = []
    threads = [
        threading.Thread(target=lambda: found.append(client.start(name, limit_bytes=1 << 20, idle_s=60)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({keeper.endpoint.identity for keeper in found}) == 1
    process = psutil.Process(found[0].about()["process"])
    found[0].end()
    ended(process)


def test_it_ends_by_itself_but_not_while_a_rank_is_there() -> None:
    with keeping(idle_s=0.3) as keeper:
        process = psutil.Process(keeper.about()["process"])
        with keeper.attach():
            with pytest.raises(psutil.TimeoutExpired):
                process.wait(timeout=1.0)  # three times as long as it would wait for one
            keeper.write("a", "x", [b"1"])
        ended(process)


# -- who gets at it ----------------------------------------------------------------------------------------------------


def test_another_host_shows_the_secret(keeper: Keeper) -> None:
    other = remote(keeper)
    other.write("a", "x", [b"12"])
    assert keeper.read("a", "x") == b"12"
    with pytest.raises(StorageError, match=r"keeper at 127\.0\.0\.1:\d+: folders failed: "):
        remote(keeper, secret=bytes(32)).folders()
    for forbidden in ({"operation": "end"}, {"operation": "limit", "bytes": 1}, {"operation": "attach"}, {}):
        with other._connect() as connection:
            wire.send(connection, forbidden)
            assert "is unknown, or is not for other hosts" in wire.receive(connection)["error"]
    assert "secret" not in other.about()
    assert keeper.endpoint.secret.hex() not in repr(keeper.endpoint) + str(other.endpoint)


def test_it_listens_where_it_was_told_and_nowhere_else(keeper: Keeper) -> None:
    process = psutil.Process(keeper.about()["process"])
    assert process.net_connections("inet") == []
    port = keeper.listen("127.0.0.1")
    assert keeper.listen("127.0.0.1") == port
    assert [tuple(each.laddr) for each in process.net_connections("inet") if each.status == "LISTEN"] == [
        ("127.0.0.1", port)
    ]


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.0\r\n\r\n", bytes(range(200)), bytes(32)])
def test_strangers_do_no_harm(keeper: Keeper, said: bytes) -> None:
    port = keeper.listen("127.0.0.1")
    with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
        stranger.sendall(said)
        with contextlib.suppress(OSError):  # it may have hung up already
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    assert keeper.folders() == ()


def test_what_is_no_request_is_refused(keeper: Keeper) -> None:
    for request in ({"operation": "read"}, {"operation": "write", "folder": "a"}, {"operation": "limit"}):
        with keeper._connect() as connection:
            wire.send(connection, request)
            assert "Error" in wire.receive(connection)["error"]
    with keeper._connect() as connection:
        connection.sendall(b"\xff\xff\xff\xff")
        assert connection.recv(1) == b""
    assert keeper.folders() == ()


def test_a_tensor_is_kept_without_a_copy_of_its_own(keeper: Keeper) -> None:
    values = torch.arange(1 << 18, dtype=torch.float32)
    keeper.write("a", "x", [values.numpy().data])
    assert keeper.read("a", "x") == values.numpy().tobytes()
