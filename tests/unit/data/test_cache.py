"""The cache in one process: what is fetched, what is kept, what is found to be wrong, what is left behind."""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_dist.data.cache import cached_files, host_chunks, host_lock, room
from lightning_dist.data.cache.cached_chunks import CachedChunks, CacheOptions, open_chunks
from lightning_dist.data.cache.host_lock import HostLock
from lightning_dist.data.cache.private_folder import default_folder
from lightning_dist.data.decoded import Decoded
from lightning_dist.data.index.dataset_index import Chunk, DatasetIndex
from lightning_dist.data.reading import Chunks, Place, open_chunk
from lightning_dist.data.storage.shards import open_read_folder
from lightning_dist.errors import ConfigError, DataCacheError, DataError, UnreadableShardError
from lightning_dist.events import EventStream
from tests.support.stored import StoredFolder, read_chunk, store, stored_chunk

SIZE = 1000


class Counts(Counter[str]):
    def __call__(self, name: str, value: float) -> None:
        self[name] += value  # type: ignore[assignment]


class Bench:
    """A data set of six chunks in two shards, and caches of it."""

    def __init__(self, folder: Path, *, checksums: bool = True) -> None:
        self.data = folder / "data"
        self.index = store(self.data, num_shards=2, chunks_per_shard=3, chunk_bytes=SIZE, checksums=checksums)
        self.storage = StoredFolder(self.data, folder / "log", folder / "gate")
        self.root = folder / "cache"
        self.counts = Counts()
        self.opened: list[Chunks] = []

    def open(self, index: DatasetIndex | None = None, **options: Any) -> Chunks:
        """As another process would: nothing is known of what was placed before."""
        cache = CacheOptions(folder=self.root, **options)
        self.opened.append(open_chunks(self.storage, index or self.index, options=cache, count=self.counts))
        return self.opened[-1]

    def right(self, chunks: Chunks, *numbers: int) -> None:
        for number in numbers:
            assert read_chunk(chunks, self.index, number) == stored_chunk(self.data, self.index, number)

    def cached(self) -> set[int]:
        return {int(path.name) for path in self.root.glob("sets/*/*") if path.name.isdigit()}

    def file(self, number: int) -> Path:
        return next(self.root.glob(f"sets/*/{number}"))

    def fetched(self) -> list[int]:
        """Numbers of the chunks asked of storage."""
        return [int(r.name[0]) * 3 + r.start // SIZE for r in self.storage.requests()]

    def fetching(self) -> list[str]:
        return sorted(path.name for path in (self.root / "fetching").iterdir())


@pytest.fixture(params=[True, False], ids=["checksums", "no-checksums"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, checksums=request.param)
    yield made
    for chunks in made.opened:
        chunks.close()


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for chunks in made.opened:
        chunks.close()


def test_a_second_pass_reads_nothing_from_storage(bench: Bench) -> None:
    chunks = bench.open()
    bench.right(chunks, *range(6), *range(6))
    bench.right(bench.open(), *range(6))
    assert bench.storage.times_read() == {1: 6 * SIZE}
    assert bench.counts["data.shared_bytes"] == 6 * SIZE
    assert bench.counts["data.cache_bytes"] == 12 * SIZE
    assert bench.counts["data.fetch_s"] > 0
    assert bench.fetching() == []


def test_the_same_data_of_another_server_are_other_files(tmp_path: Path) -> None:
    """Without checksums, nothing else would tell them apart."""
    made = Bench(tmp_path, checksums=False)
    made.right(made.open(), 0)
    made.storage = replace(made.storage, origin="stored://data endpoint_url=http://other")
    shard = made.data / "0.bin"
    shard.write_bytes(bytes(byte ^ 1 for byte in shard.read_bytes()))
    made.right(made.open(), 0)
    for chunks in made.opened:
        chunks.close()


def test_local_data_are_read_where_they_are(one: Bench) -> None:
    chunks = open_chunks(open_read_folder(one.data), one.index)
    assert chunks.place(one.index.chunk(4)) == Place(one.data / "1.bin", SIZE, SIZE)
    chunks.expect([one.index.chunk(0)])
    chunks.close()
    (one.data / "1.bin").write_bytes(b"x" * (2 * SIZE - 1))
    with pytest.raises(UnreadableShardError, match=r"1\.bin has 1999 bytes, .* a chunk reaches to byte 2000"):
        chunks.place(one.index.chunk(4))
    (one.data / "1.bin").unlink()
    with pytest.raises(UnreadableShardError, match=r"1\.bin cannot be read: No such file"):
        chunks.place(one.index.chunk(4))


def test_what_was_used_least_lately_goes_first(one: Bench) -> None:
    chunks = one.open(limit_bytes=3 * SIZE)
    one.right(chunks, 0, 1, 2, 0)
    one.right(chunks, 3)
    assert one.cached() == {0, 2, 3}
    one.right(one.open(limit_bytes=3 * SIZE), 2)  # use in another process counts as well
    one.right(chunks, 4)
    assert one.cached() == {2, 3, 4}
    assert one.counts["data.evictions"] == 2


def test_data_sets_share_the_limit(one: Bench) -> None:
    other = replace(one.index, properties={"other": 1})
    first, second = one.open(limit_bytes=3 * SIZE), one.open(other, limit_bytes=3 * SIZE)
    one.right(first, 0, 1)
    one.right(second, 0, 1)
    assert len(list(one.root.glob("sets/*/[0-9]*"))) == 3
    one.right(first, 1, 2, 3, 4)
    assert len(list(one.root.glob("sets/*"))) == 1  # the folder of a data set that has no chunk left goes, too


def test_what_others_have_open_or_mapped_can_be_removed(one: Bench) -> None:
    chunks = one.open(limit_bytes=SIZE)
    place = chunks.place(one.index.chunk(0))
    with open(place.path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        one.right(chunks, 1, 2)
        assert not place.path.exists()
        assert file.read() == mapped[:] == stored_chunk(one.data, one.index, 0)


def test_what_is_removed_before_it_is_opened_is_placed_again(one: Bench) -> None:
    chunks, tries = one.open(limit_bytes=SIZE), []

    class Bytes:
        name = "bytes"

        def open(self, place: Place, chunk: object, properties: object, decoded: Decoded) -> Any:
            tries.append(place)
            if len(tries) < 3:
                chunks.place(one.index.chunk(len(tries)))
            try:
                return place.path.read_bytes()
            except OSError as error:
                raise UnreadableShardError("not in this format") from error

    opened: Any = open_chunk(chunks, Bytes(), one.index.chunk(0), {}, Decoded())  # type: ignore[arg-type]
    assert opened == stored_chunk(one.data, one.index, 0)
    assert len(tries) == 3
    one.file(0).write_bytes(b"")
    Bytes.open = lambda *args: (_ for _ in ()).throw(UnreadableShardError("wrong"))  # type: ignore[method-assign]
    with pytest.raises(UnreadableShardError, match="wrong"):
        open_chunk(chunks, Bytes(), one.index.chunk(0), {}, Decoded())  # type: ignore[arg-type]


def test_a_limit_below_one_chunk_is_refused(one: Bench) -> None:
    with pytest.raises(ConfigError, match=r"may hold 999 bytes, and the largest chunk of stored://data has 1000"):
        one.open(limit_bytes=SIZE - 1)


@pytest.mark.parametrize("known", [True, False], ids=["known", "new-process"])
@pytest.mark.parametrize("damage", ["torn", "flipped", "longer", "empty"])
def test_a_damaged_file_is_fetched_again(bench: Bench, damage: str, known: bool) -> None:
    chunks = bench.open()
    bench.right(chunks, 0, 1)
    data = bench.file(0).read_bytes()
    changed = bytes([data[0] ^ 1]) + data[1:]
    bench.file(0).write_bytes({"torn": data[:-1], "flipped": changed, "longer": data + b"x", "empty": b""}[damage])
    bench.right(chunks if known else bench.open(), 0, 1)
    assert bench.fetched() == [0, 1, 0]
    assert bench.counts["data.refetches"] == 1


def test_after_a_boot_files_are_checked_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.right(bench.open(), 0, 1)
    data = bench.file(0).read_bytes()
    times = os.stat(bench.file(0))
    bench.file(0).write_bytes(bytes(SIZE))  # what a power cut leaves: the size and the times are right
    os.utime(bench.file(0), ns=(times.st_atime_ns, times.st_mtime_ns))
    for module in (cached_files, room):
        monkeypatch.setattr(module, "this_boot", lambda: "0" * 32)
    read: list[Path] = []
    true_crc32 = cached_files._crc32
    monkeypatch.setattr(cached_files, "_crc32", lambda path: (read.append(path), true_crc32(path))[1])
    bench.right(bench.open(), 0, 1)
    bench.right(bench.open(), 0, 1)
    assert [path.name for path in read] == ["0", "1"]
    assert bench.fetched() == [0, 1, 0]
    assert bench.file(0).read_bytes() == data


def test_seals_that_are_torn_or_lost_make_files_suspect(bench: Bench) -> None:
    bench.right(bench.open(), 0, 1)
    seals = next(bench.root.glob("sets/*/seals"))
    seals.write_bytes(seals.read_bytes()[:-5] + b"\x00\x00\xff\n garbage here and there\n")
    bench.right(bench.open(), 0, 1)
    seals.unlink()
    bench.right(bench.open(), 0, 1)
    assert set(bench.storage.times_read()) <= ({1} if bench.index.crc32 is not None else {1, 2, 3})


def test_bytes_that_are_not_what_the_index_says(one: Bench) -> None:
    (one.data / "0.bin").write_bytes(bytes(3 * SIZE))
    chunks = one.open()
    with pytest.raises(
        UnreadableShardError, match=r"chunk 1 of stored://data \(bytes 1000 to 2000 of 0\.bin\) has the ch"
    ):
        chunks.place(one.index.chunk(1))
    assert one.fetched() == [1, 1]  # once more, as the network may have erred
    assert one.cached() == set()


def test_a_failure_is_remembered_for_a_while_by_all(one: Bench) -> None:
    (one.data / "0.bin").rename(one.data / "away")
    with pytest.raises(UnreadableShardError, match=r"stored://data/0\.bin: it is not there$"):
        one.open().place(one.index.chunk(0))
    for chunks in (one.opened[0], one.open()):
        found = rf"it is not there \(found by process {os.getpid()} \d+ s ago; not tried again within 10 s\)"
        with pytest.raises(UnreadableShardError, match=found):
            chunks.place(one.index.chunk(0))
    assert one.fetched() == [0]
    (one.data / "away").rename(one.data / "0.bin")
    one.right(one.open(failure_s=0), 0)
    assert one.fetching() == []


def test_what_dead_processes_left_is_removed_at_start(one: Bench) -> None:
    one.right(one.open(limit_bytes=2 * SIZE), 0, 1)
    name = one.file(0).parent.name
    (one.root / f"fetching/{name}-4.part").write_bytes(bytes(SIZE))
    (one.root / f"fetching/{name}-4.lock").write_bytes(b"1 1.0\n")
    (one.root / f"fetching/{name}-5.part").write_bytes(b"")
    (one.root / f"fetching/{name}-5.failed").write_text("1\nno")
    os.utime(one.root / f"fetching/{name}-5.failed", (1, 1))
    alive = HostLock(one.root / f"fetching/{name}-3.lock")
    assert alive.try_acquire()
    one.open(limit_bytes=2 * SIZE)
    assert one.fetching() == [f"{name}-3.lock"]
    alive.release()
    one.right(one.open(limit_bytes=2 * SIZE), 4, 5)
    assert one.cached() == {4, 5}


@pytest.mark.parametrize("total", ["", "0" * 32 + " 7\n", "what\n", "{boot} 99999999999\n", None])
def test_a_total_that_is_wrong_is_counted_anew(one: Bench, total: str | None) -> None:
    one.right(one.open(limit_bytes=2 * SIZE), 0, 1)
    if total is None:
        (one.root / "total").unlink()
    else:
        (one.root / "total").write_text(total.format(boot=room.this_boot()))
    one.right(one.open(limit_bytes=2 * SIZE), 2)
    assert one.cached() == {1, 2}
    assert (one.root / "total").read_text().split()[1] == f"{2 * SIZE:020d}"


def fail_at(calls: list[int], number: int) -> Callable[..., Any]:
    """``os.pwrite`` to a disk that has room for so many bytes of chunks now and then."""
    true_pwrite = os.pwrite

    def pwrite(descriptor: int, data: memoryview, start: int) -> int:
        if len(data) >= SIZE // 2:
            calls.append(len(data))
            if len(calls) in (3, 4, 5):
                raise OSError(number, os.strerror(number))
            return true_pwrite(descriptor, data[: SIZE // 2 + 1], start)
        return true_pwrite(descriptor, data, start)

    return pwrite


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_on_a_full_disk_the_oldest_goes(one: Bench, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(room, "_FULL_BYTES", 1)
    chunks = one.open()
    one.right(chunks, 0, 1, 2, 3)
    monkeypatch.setattr(room.os, "pwrite", fail_at([0, 0], number))
    one.right(chunks, 4)
    assert one.cached() == {3, 4}


def test_a_disk_that_stays_full_is_said(one: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = one.open()
    one.right(chunks, 0)
    monkeypatch.setattr(room.os, "pwrite", fail_at([0, 0], errno.ENOSPC))
    monkeypatch.setattr(room, "_FULL_BYTES", 1)
    with pytest.raises(
        DataCacheError, match=r"disk of the cache .*cache is full \(No space left .*name another folder"
    ):
        chunks.place(one.index.chunk(1))
    monkeypatch.undo()
    assert one.fetching() == []
    one.right(chunks, 1)


def test_a_disk_that_refuses_is_said(one: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = one.open()
    monkeypatch.setattr(room.os, "pwrite", fail_at([0, 0], errno.EIO))
    with pytest.raises(DataCacheError, match=r"the cache .* cannot be written: .*Input/output error"):
        chunks.place(one.index.chunk(1))
    assert one.fetching() == []


def test_what_is_there_is_read_from_a_disk_that_became_read_only(one: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks, true_open = one.open(), os.open
    one.right(chunks, 0)

    def read_only(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if str(path).startswith(str(one.root)) and flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return true_open(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", read_only)
    one.right(chunks, 0)
    said = r"the cache .*cache cannot be written: .*Read-only file system.*name another folder"
    with pytest.raises(DataCacheError, match=said):
        chunks.place(one.index.chunk(1))
    with pytest.raises(DataCacheError, match=said):
        one.open()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_a_cache_where_files_cannot_be_locked_is_refused(
    one: Bench, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(host_lock.fcntl, "flock", refuse)
    with pytest.raises(
        DataCacheError, match=r"cache is on a file system without locks \(.*: name a folder on a disk of this host"
    ):
        one.open()


def test_the_folder_is_made_for_this_user_alone(one: Bench) -> None:
    one.right(one.open(), 0)
    for folder in (one.root, one.root / "sets", one.root / "fetching", one.file(0).parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert one.file(0).stat().st_mode & 0o777 == 0o600


def test_ground_that_others_can_write_is_refused(one: Bench) -> None:
    one.root.mkdir()
    one.root.chmod(0o777)
    with pytest.raises(DataCacheError, match=r"others may write there \(its mode is 777\).*name another folder"):
        one.open()
    one.root.rmdir()
    one.root.write_text("a file")
    with pytest.raises(DataCacheError, match="cannot be a cache: Not a directory"):
        one.open()
    one.root.unlink()
    (one.root.parent / "mine").mkdir(mode=0o700)
    one.root.symlink_to(one.root.parent / "mine")
    one.right(one.open(), 0)
    assert (one.root.parent / "mine/sets").is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_what_belongs_to_others_is_refused(one: Bench, kind: str) -> None:
    if kind == "folder":
        one.root.mkdir(mode=0o700)
        os.chown(one.root, 12345, 12345)
    else:
        (one.root.parent / "mine").mkdir(mode=0o700)
        one.root.symlink_to(one.root.parent / "mine")
        os.lchown(one.root, 12345, 12345)
    with pytest.raises(DataCacheError, match=r"belongs to user 12345, and this process is user 0"):
        one.open()


def test_by_default_it_is_in_the_users_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert default_folder() == tmp_path / "x/lightning_dist/data"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_folder() == tmp_path / "home/.cache/lightning_dist/data"
    monkeypatch.setattr(Path, "expanduser", lambda self: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(DataCacheError, match="this user has no home, so name another folder"):
        default_folder()


def test_chunks_are_fetched_before_they_are_asked_for(one: Bench) -> None:
    chunks = one.open(ahead_bytes=2 * SIZE, limit_bytes=100 * SIZE)
    chunks.expect(one.index.chunk(number) for number in range(6))
    wait_until(lambda: one.cached() == {0, 1})
    assert set(one.fetched()) == {0, 1}
    for number in range(6):
        one.right(chunks, number)
    assert one.storage.times_read() == {1: 6 * SIZE}
    assert one.counts["data.cache_bytes"] == 0  # all came from storage, for this process


def test_a_chunk_asked_for_as_its_fetch_ends_is_not_counted_as_found(
    one: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = host_chunks.HostChunks._fetched

    def asked_for_at_once(self: host_chunks.HostChunks, chunk: Chunk, part: Path) -> Any:
        file = fetched(self, chunk, part)
        self.place(chunk)  # the file is there, and whoever asks finds it
        return file

    monkeypatch.setattr(host_chunks.HostChunks, "_fetched", asked_for_at_once)
    chunks = one.open(ahead_bytes=SIZE)
    chunks.expect([one.index.chunk(0)])
    wait_until(lambda: one.cached() == {0} and not one.fetching())
    assert one.counts["data.cache_bytes"] == 0
    one.right(chunks, 0)
    assert one.counts["data.cache_bytes"] == SIZE  # the second time, it was there


def test_a_chunk_that_is_on_its_way_is_waited_for(one: Bench) -> None:
    chunks = one.open(threads=1)
    gate = one.storage.gate
    assert gate is not None
    gate.touch()
    chunks.expect([one.index.chunk(0)])
    wait_until(lambda: one.fetched() == [0])
    reader = threading.Thread(target=one.right, args=(chunks, 0))
    reader.start()
    gate.unlink()
    reader.join(timeout=30)
    assert not reader.is_alive()
    assert one.fetched() == [0]


def test_errors_of_what_is_fetched_ahead_come_when_it_is_asked_for(one: Bench) -> None:
    (one.data / "0.bin").unlink()
    chunks = one.open()
    chunks.expect([one.index.chunk(number) for number in (0, 3)])
    wait_until(lambda: one.cached() == {3} and 0 in one.fetched())
    one.right(chunks, 3)
    with pytest.raises(UnreadableShardError, match="it is not there"):
        chunks.place(one.index.chunk(0))


def test_fetching_ahead_does_not_remove_what_was_placed_last(one: Bench) -> None:
    chunks = one.open(limit_bytes=2 * SIZE, ahead_bytes=2 * SIZE, threads=1)
    one.right(chunks, 0, 1)
    chunks.expect([one.index.chunk(2)])
    one.right(chunks, 0, 1)
    assert one.cached() == {0, 1}
    one.right(chunks, 2)
    assert one.cached() == {1, 2}


def test_a_stopped_process_that_fetches_is_named(one: Bench) -> None:
    chunks = one.open(wait_s=0.2)
    one.right(chunks, 0)
    lock = HostLock(one.root / f"fetching/{one.file(0).parent.name}-1.lock")
    assert lock.try_acquire()
    said = rf"chunk 1 of .* is being fetched by process {os.getpid()} \(this one\) since [\d:]+, and no byte has come"
    with pytest.raises(DataCacheError, match=said):
        chunks.place(one.index.chunk(1))
    lock.release()
    one.right(chunks, 1)


def test_a_cache_that_others_fill_is_waited_for(one: Bench) -> None:
    chunks = one.open(wait_s=0.2, limit_bytes=SIZE)
    one.right(chunks, 0)
    name = one.file(0).parent.name
    lock, part = HostLock(one.root / f"fetching/{name}-1.lock"), one.root / f"fetching/{name}-1.part"
    assert lock.try_acquire()
    part.write_bytes(bytes(SIZE))
    (one.root / "total").unlink()
    with pytest.raises(DataCacheError, match=r"no room for chunk 2 .* fills the 1000 bytes that the cache"):
        chunks.place(one.index.chunk(2))
    lock.release()  # it died: what it left is removed
    one.right(chunks, 2)
    assert one.fetching() == []


def test_closing_ends_all(one: Bench) -> None:
    chunks = one.open()
    before = set(threading.enumerate())
    chunks.expect(one.index.chunk(number) for number in range(6))
    assert len(set(threading.enumerate()) - before) == 2
    chunks.close()
    chunks.close()
    assert set(threading.enumerate()) <= before
    assert one.fetching() == []
    for use in (lambda: chunks.place(one.index.chunk(0)), lambda: chunks.expect([])):
        with pytest.raises(DataCacheError, match="are closed"):
            use()


def test_a_pickled_copy_reads_the_same_cache(one: Bench) -> None:
    chunks = open_chunks(one.storage, one.index, options=CacheOptions(folder=one.root))
    one.opened.append(chunks)
    one.right(chunks, 0)
    copy = pickle.loads(pickle.dumps(chunks))
    one.opened.append(copy)
    one.right(copy, 0, 1)
    assert one.fetched() == [0, 1]


def test_chunks_of_no_bytes_and_of_several_pieces(one: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_chunks, "_PIECE_BYTES", 300)
    one.index = replace(one.index, sizes=one.index.sizes * [0, 1, 1, 1, 1, 1], crc32=None)
    one.right(one.open(), 0, 1)
    one.right(one.open(), 0, 1)
    assert [request.size_bytes for request in one.storage.requests()] == [300, 300, 300, 100]


def test_an_event_stream_counts(one: Bench) -> None:
    events = EventStream()
    chunks = open_chunks(one.storage, one.index, options=CacheOptions(folder=one.root), count=events.count)
    one.opened.append(chunks)
    one.right(chunks, 0, 0)
    seen = {event.name: event.value for event in events.snapshot()}
    assert seen.keys() == {"data.shared_bytes", "data.fetch_s", "data.cache_bytes"}
    assert seen["data.shared_bytes"] == seen["data.cache_bytes"] == SIZE


def test_all_errors_are_data_errors(one: Bench) -> None:
    assert issubclass(DataCacheError, DataError)
    assert not issubclass(DataCacheError, UnreadableShardError)  # a full disk is no shard to be skipped
    assert isinstance(one.open(), CachedChunks)
    assert re.fullmatch(r"[0-9a-f]{16}-[0-9a-f]{32}", one.opened[0]._this_process()._set)  # type: ignore[attr-defined]


def wait_until(condition: Callable[[], bool]) -> None:
    event = threading.Event()
    for _ in range(3000):
        if condition():
            return
        event.wait(0.01)
    raise AssertionError("it did not come to that within 30 s")
