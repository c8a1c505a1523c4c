"""The cache under several processes: each byte comes once, the bound holds, and kills leave nothing wrong."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_dist.data.cache.cached_chunks import CacheOptions, open_chunks
from lightning_dist.data.cache.host_lock import held
from lightning_dist.data.index.dataset_index import DatasetIndex
from lightning_dist.data.reading import Chunks
from lightning_dist.errors import DataCacheError, UnreadableShardError
from tests.support.fresh import run_script
from tests.support.ranks import Died, RankContext, RankPool
from tests.support.stored import StoredFolder, read_chunk, store, stored_chunk
from tests.support.tied import CLONE_NEWNS

SIZE = 20_000
SCRIPTS = Path(__file__).parent / "scripts"


@contextlib.contextmanager
def opened(storage: StoredFolder, index: DatasetIndex, root: Path, **options: Any) -> Iterator[Chunks]:
    chunks = open_chunks(storage, index, options=CacheOptions(folder=root, **options))
    try:
        yield chunks
    finally:
        chunks.close()


def check(chunks: Chunks, storage: StoredFolder, index: DatasetIndex, number: int) -> None:
    assert read_chunk(chunks, index, number) == stored_chunk(storage.folder, index, number)


def bytes_on_disk(root: Path) -> int:
    """Of all chunks, also those being fetched, at one moment."""
    with held(root / "lock", wait_s=30.0):
        chunks = [path for path in root.glob("sets/*/*") if path.name.isdigit()]
        return sum(path.stat().st_size for path in [*chunks, *root.glob("fetching/*.part")])


def fetching(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "fetching").iterdir())


def read_all_in_order(context: RankContext, storage: StoredFolder, index: DatasetIndex, root: Path) -> None:
    with opened(storage, index, root, ahead_bytes=4 * SIZE) as chunks:
        for _ in range(2):
            chunks.expect(map(index.chunk, range(index.num_chunks)))
            for number in range(index.num_chunks):
                check(chunks, storage, index, number)


def test_four_processes_read_each_byte_once(ranks: RankPool, tmp_path: Path) -> None:
    index = store(tmp_path / "data", num_shards=4, chunks_per_shard=6, chunk_bytes=SIZE)
    storage, root = StoredFolder(tmp_path / "data", tmp_path / "log"), tmp_path / "cache"
    ranks.run(read_all_in_order, world_size=4, args=(storage, index, root), init_group=False)
    assert storage.times_read() == {1: 24 * SIZE}
    assert fetching(root) == []


def read_at_random(context: RankContext, storage: StoredFolder, index: DatasetIndex, root: Path, num_reads: int) -> int:
    order, most = random.Random(context.rank), 0
    with opened(storage, index, root, limit_bytes=5 * SIZE, ahead_bytes=2 * SIZE) as chunks:
        for _ in range(num_reads):
            numbers = order.sample(range(index.num_chunks), 3)
            chunks.expect(map(index.chunk, numbers))
            for number in numbers:
                check(chunks, storage, index, number)
                most = max(most, bytes_on_disk(root))
    return most


def test_the_bound_holds_under_four_processes(ranks: RankPool, tmp_path: Path) -> None:
    index = store(tmp_path / "data", num_shards=2, chunks_per_shard=6, chunk_bytes=SIZE, checksums=False)
    storage, root = StoredFolder(tmp_path / "data", tmp_path / "log"), tmp_path / "cache"
    most = ranks.run(read_at_random, world_size=4, args=(storage, index, root, 15), init_group=False)
    assert max(most) <= 5 * SIZE
    assert max(most) > 3 * SIZE
    assert fetching(root) == []
    total = int((root / "total").read_text().split()[1])
    assert total == bytes_on_disk(root)


def read_until_killed(context: RankContext, storage: StoredFolder, index: DatasetIndex, root: Path, seed: int) -> None:
    order = random.Random(4 * seed + context.rank)
    timer = threading.Timer(order.uniform(0.0, 0.3), os.kill, (os.getpid(), signal.SIGKILL))
    with opened(storage, index, root, limit_bytes=4 * SIZE, ahead_bytes=2 * SIZE) as chunks:
        timer.start()
        while True:
            numbers = order.sample(range(index.num_chunks), 3)
            chunks.expect(map(index.chunk, numbers))
            for number in numbers:
                check(chunks, storage, index, number)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(2, 20))])
def test_after_kills_at_random_moments_all_is_read_right(ranks: RankPool, tmp_path: Path, seed: int) -> None:
    index = store(tmp_path / "data", num_shards=2, chunks_per_shard=4, chunk_bytes=SIZE)
    storage, root = StoredFolder(tmp_path / "data", tmp_path / "log"), tmp_path / "cache"
    args = (storage, index, root, seed)
    ended = ranks.run(read_until_killed, world_size=4, args=args, init_group=False, may_die=range(4))
    assert ended == [Died(-signal.SIGKILL)] * 4
    assert bytes_on_disk(root) <= 4 * SIZE
    with opened(storage, index, root, limit_bytes=4 * SIZE) as chunks:
        assert fetching(root) == []
        for number in range(index.num_chunks):
            check(chunks, storage, index, number)
    assert fetching(root) == []
    assert bytes_on_disk(root) <= 4 * SIZE


# What changes something on disk; a process that is killed in between leaves what these have done.
CALLS = ("open", "pwrite", "rename", "replace", "unlink", "utime", "ftruncate", "mkdir", "rmdir")


def killed_at(number: int) -> None:
    """This process is killed before its call of that number."""
    calls = itertools.count()

    def counted(true: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return true(*arguments, **options)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def use(storage: StoredFolder, index: DatasetIndex, root: Path) -> None:
    """What is to be killed: fetches, evictions, a damaged file."""
    with opened(storage, index, root, limit_bytes=2 * SIZE, threads=0) as chunks:
        for number in (0, 1, 2, 0):
            check(chunks, storage, index, number)
        next(root.glob("sets/*/2")).write_bytes(b"torn")
        check(chunks, storage, index, 2)
        with contextlib.suppress(UnreadableShardError):
            chunks.place(replace_sum(index).chunk(3))


def replace_sum(index: DatasetIndex) -> DatasetIndex:
    assert index.crc32 is not None
    return replace(index, crc32=index.crc32 * 0)


def kill_at_each_call(context: RankContext, storage: StoredFolder, index: DatasetIndex, stride: int) -> int:
    """In this process, which has no threads, so that children can be forked from it."""
    for number in itertools.count(0, stride):
        root = context.tmp_path / str(number)
        child = os.fork()
        if not child:
            try:
                killed_at(number)
                use(storage, index, root)
            except BaseException:
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != -signal.SIGKILL:
            assert code == 0, f"the call before {number}"
            return number
        if root.exists() and (root / "fetching").exists():
            assert bytes_on_disk(root) <= 2 * SIZE, number
        with opened(storage, index, root, limit_bytes=2 * SIZE, threads=0, failure_s=0) as chunks:
            left = [name for name in fetching(root) if not name.endswith(".failed")]
            assert left == [], number
            for chunk in (3, 0, 1, 2, 0):
                check(chunks, storage, index, chunk)
        assert fetching(root) == [], number
        assert bytes_on_disk(root) == int((root / "total").read_text().split()[1]) == 2 * SIZE, number
    raise AssertionError("it never ends")


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.sweep)])
def test_a_kill_between_any_two_changes_leaves_nothing_wrong(ranks: RankPool, tmp_path: Path, stride: int) -> None:
    index = store(tmp_path / "data", num_shards=1, chunks_per_shard=4, chunk_bytes=SIZE)
    storage = StoredFolder(tmp_path / "data", tmp_path / "log")
    args = (storage, index, stride)
    (count,) = ranks.run(kill_at_each_call, world_size=1, args=args, init_group=False, fresh=True, deadline_s=110)
    assert count > 100


def hold_and_fork(storage: StoredFolder, index: DatasetIndex, root: Path, report: int) -> None:
    """Fetch a chunk that does not come, fork a child that lives on, and say so."""
    chunks = open_chunks(storage, index, options=CacheOptions(folder=root, threads=1))
    chunks.expect([index.chunk(0)])
    while not storage.requests():
        time.sleep(0.005)
    child = os.fork()
    if child:
        os.write(report, f"{child}\n".encode())
    time.sleep(60)


def take_over(context: RankContext, storage: StoredFolder, index: DatasetIndex) -> str:
    root = context.tmp_path / "cache"
    assert storage.gate is not None
    storage.gate.touch()
    reading, report = os.pipe()
    parent = os.fork()
    if not parent:
        hold_and_fork(storage, index, root, report)
        os._exit(1)
    with open(reading) as answers:
        os.close(report)
        child = int(answers.readline())
        said = ""
        try:
            with opened(storage, index, root, wait_s=0.3) as chunks:
                try:
                    chunks.place(index.chunk(0))
                except DataCacheError as error:
                    said = str(error)
                os.kill(parent, signal.SIGKILL)
                os.waitpid(parent, 0)
                storage.gate.unlink()
                os.kill(child, 0)
                check(chunks, storage, index, 0)
        finally:
            os.kill(child, signal.SIGKILL)
            answers.read()
    return said.replace(str(parent), "PARENT")


def test_a_forked_child_does_not_keep_the_locks_of_its_dead_parent(ranks: RankPool, tmp_path: Path) -> None:
    index = store(tmp_path / "data", num_shards=1, chunks_per_shard=1, chunk_bytes=SIZE)
    storage = StoredFolder(tmp_path / "data", tmp_path / "log", tmp_path / "gate")
    said = ranks.run(take_over, world_size=1, args=(storage, index), init_group=False, fresh=True)[0]
    assert "chunk 0 of stored://data (bytes 0 to 20000 of 0.bin) is being fetched by process PARENT since " in said
    assert "no byte has come for 0.3 s" in said


def read_in_forks(context: RankContext, storage: StoredFolder, index: DatasetIndex) -> list[int]:
    """Chunks that were opened, and fetch ahead, before forks, as data loaders fork their workers."""
    codes = []
    with opened(storage, index, context.tmp_path / "cache", ahead_bytes=2 * SIZE) as chunks:
        chunks.expect(map(index.chunk, range(index.num_chunks)))
        children = []
        for worker in range(3):
            child = os.fork()
            if not child:
                try:
                    signal.alarm(40)
                    chunks.expect(map(index.chunk, range(worker, index.num_chunks)))
                    for number in range(index.num_chunks):
                        check(chunks, storage, index, number)
                    chunks.close()
                except BaseException:
                    os._exit(1)
                os._exit(0)
            children.append(child)
            check(chunks, storage, index, worker)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        check(chunks, storage, index, 0)
    return codes


def test_chunks_are_used_in_forked_workers(ranks: RankPool, tmp_path: Path) -> None:
    index = store(tmp_path / "data", num_shards=2, chunks_per_shard=6, chunk_bytes=SIZE)
    storage = StoredFolder(tmp_path / "data", tmp_path / "log")
    assert ranks.run(read_in_forks, world_size=1, args=(storage, index), init_group=False, fresh=True) == [[0, 0, 0]]
    assert storage.times_read() == {1: 12 * SIZE}


def find_unreadable(context: RankContext, storage: StoredFolder, index: DatasetIndex, root: Path) -> list[str]:
    said = []
    with opened(storage, index, root, failure_s=30.0) as chunks:
        for _ in range(3):
            try:
                chunks.place(index.chunk(1))
            except UnreadableShardError as error:
                said.append(str(error))
    return said


def test_all_processes_get_the_error_of_the_one_that_asked(ranks: RankPool, tmp_path: Path) -> None:
    index = store(tmp_path / "data", num_shards=1, chunks_per_shard=2, chunk_bytes=SIZE)
    storage, root = StoredFolder(tmp_path / "data", tmp_path / "log"), tmp_path / "cache"
    os.truncate(tmp_path / "data/0.bin", 2 * SIZE - 1)
    said = ranks.run(find_unreadable, world_size=4, args=(storage, index, root), init_group=False)
    assert [len(texts) for texts in said] == [3] * 4
    assert all(text.startswith("cannot read stored://data/0.bin: cut short") for texts in said for text in texts)
    assert len(storage.requests()) == 1


def read_on_a_small_disk(context: RankContext, storage: StoredFolder, index: DatasetIndex) -> tuple[int, str]:
    """On a disk of its own, which goes with this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS) == 0
    disk = context.tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={8 * SIZE}", "tmpfs", disk], check=True)
    with opened(storage, index, disk / "cache", threads=0) as chunks:
        for number in range(index.num_chunks):
            check(chunks, storage, index, number)
        kept = sum(path.name.isdigit() for path in disk.glob("cache/sets/*/*"))
        said = ""
        with contextlib.ExitStack() as readers:  # what they have open stays on the disk
            for path in disk.glob("cache/sets/*/*"):
                readers.enter_context(open(path, "rb"))
            with open(disk / "other", "wb", buffering=0) as other, contextlib.suppress(OSError):
                while other.write(bytes(4096)):
                    pass
            try:
                chunks.place(index.chunk(0))
            except DataCacheError as error:
                said = str(error)
        (disk / "other").unlink()
        for number in range(index.num_chunks):
            check(chunks, storage, index, number)
    return kept, said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_is_smaller_than_the_limit(ranks: RankPool, tmp_path: Path) -> None:
    index = store(tmp_path / "data", num_shards=2, chunks_per_shard=8, chunk_bytes=SIZE)
    storage = StoredFolder(tmp_path / "data", tmp_path / "log")
    kept, said = ranks.run(read_on_a_small_disk, world_size=1, args=(storage, index), init_group=False, fresh=True)[0]
    assert 1 <= kept <= 8
    assert "is full (No space left on device), and nothing of the cache is left to remove" in said


def test_a_process_that_forgets_to_close_ends(tmp_path: Path) -> None:
    """While a request that is not answered is on its way."""
    index = store(tmp_path / "data", num_shards=1, chunks_per_shard=2, chunk_bytes=SIZE)
    storage = StoredFolder(tmp_path / "data", tmp_path / "log", tmp_path / "gate")
    (tmp_path / "gate").touch()
    result = run_script([SCRIPTS / "unclosed_chunks.py", tmp_path], deadline_s=50)  # the gate opens after 60
    result.check()
    assert "bye" in result.stdout
    (tmp_path / "gate").unlink()
    with opened(storage, index, tmp_path / "cache") as chunks:
        assert fetching(tmp_path / "cache") == []
        check(chunks, storage, index, 0)
