from __future__ import annotations

import gc
import gzip
import io
import json
import tarfile
import threading
import tracemalloc
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from lightning_dist import DataConfig, ShardedLoader, Source
from lightning_dist.data.decoded import Decoded, Sized, default_limit_bytes
from lightning_dist.data.formats import Surveyed, make_format
from lightning_dist.data.index.index_file import index_bytes
from lightning_dist.data.storage.shards import open_read_folder
from lightning_dist.errors import ConfigError

FILES, ROWS, ROW_BYTES = 12, 16, 1 << 16  # a file is a MiB, decoded
LIMIT_BYTES = 4 << 20
BATCHES = 20  # of four samples, each of another file


# -- the bound ---------------------------------------------------------------------------------------------------------


def test_what_was_used_least_lately_makes_room_and_is_decoded_again() -> None:
    decoded, made = Decoded(30), []
    one, other = decoded.of_chunk(), decoded.of_chunk()

    def get(parts: Any, number: int) -> str:
        def decode() -> Sized[str]:
            made.append((parts is one, number))
            return Sized(f"part {number}", 10)

        value: str = parts.get(number, decode)
        return value

    for parts, number in ((one, 0), (one, 1), (other, 0), (one, 0)):
        assert get(parts, number) == f"part {number}"
    assert (len(made), decoded.size_bytes) == (3, 30)
    get(other, 1)
    get(one, 0)
    assert made[3:] == [(False, 1)], "part 1 of the first went, which was used least lately"
    with pytest.warns(UserWarning, match=r"0 MiB that may be decoded at a time: allow more \(data.decoded_limit\)"):
        get(one, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get(other, 0)  # said once
    assert decoded.size_bytes == 30


def test_a_part_beyond_the_limit_stays_alone_and_parts_go_with_their_chunk() -> None:
    decoded = Decoded(10)
    one, other = decoded.of_chunk(), decoded.of_chunk()
    one.get(0, lambda: Sized(0, 8))
    one.get(1, lambda: Sized(0, 0))
    assert other.get(0, lambda: Sized("large", 99)) == "large"
    assert decoded.size_bytes == 99
    assert one.get(1, lambda: pytest.fail("it takes nothing, so it stays")) == 0
    other.drop()
    other.drop()
    assert decoded.size_bytes == 0
    one.get(2, lambda: Sized(0, 8))
    assert decoded.size_bytes == 8
    del one
    gc.collect()
    assert decoded.size_bytes == 0


def test_threads_decode_a_part_once() -> None:
    parts, made, together = Decoded(100).of_chunk(), [], threading.Barrier(4)

    def decode() -> Sized[int]:
        made.append(1)
        return Sized(7, 1)

    def ask() -> None:
        together.wait(20)
        assert parts.get(0, decode) == 7

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert made == [1]


def test_the_limit_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_host = default_limit_bytes()
    for text, expected in (("1600\n", 100), ("max\n", of_host), ("99999999999999\n", of_host)):
        (tmp_path / "memory.max").write_text(text)
        monkeypatch.setattr("lightning_dist.data.decoded._CGROUP_LIMIT", tmp_path / "memory.max")
        assert default_limit_bytes() == expected
    monkeypatch.setattr("lightning_dist.data.decoded._CGROUP_LIMIT", tmp_path / "none")
    assert default_limit_bytes() == of_host


# -- formats -----------------------------------------------------------------------------------------------------------


def _text(file: int, row: int) -> str:
    return f"{file:04d}-{row:04d}-" + "x" * (ROW_BYTES - 10)


def _jsonl(path: Path, rows: list[str]) -> None:
    path.with_suffix(".jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps({"t": r}) + "\n" for r in rows).encode())
    )


def _tar(path: Path, rows: list[str]) -> None:
    with tarfile.open(path.with_suffix(".tar.gz"), "w:gz") as file:
        for number, row in enumerate(rows):
            member = tarfile.TarInfo(f"{number:04d}.t")
            member.size = len(row)
            file.addfile(member, io.BytesIO(row.encode()))


def _parquet(path: Path, rows: list[str]) -> None:
    pq.write_table(pa.table({"t": rows}), path.with_suffix(".parquet"))


def _arrow(path: Path, rows: list[str]) -> None:
    feather.write_feather(pa.table({"t": rows}), str(path.with_suffix(".arrow")), compression="zstd")


WRITERS: dict[str, Callable[[Path, list[str]], None]] = {
    "jsonl": _jsonl,
    "tar": _tar,
    "parquet": _parquet,
    "arrow": _arrow,
}


def _first(samples: list[dict[str, Any]]) -> list[str]:
    texts = [sample["t"] if isinstance(sample["t"], str) else sample["t"].decode() for sample in samples]
    return [text[:9] for text in texts]


def _most_bytes(folder: Path, limit: int | None) -> tuple[int, list[str]]:
    """What Python and Arrow have allocated at most after a batch, beyond what they had before; and the samples."""
    config = DataConfig(batch_size=4, lanes=FILES, shuffle_block=ROWS, decoded_limit=limit)
    loader = ShardedLoader(Source(folder), config=config, collate=_first)
    seen, most = [], 0
    len(loader)
    gc.collect()
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    for batch in islice(loader, BATCHES):
        seen += batch
        most = max(most, tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes() - before)
    tracemalloc.stop()
    loader.close()
    return most, seen


@pytest.mark.filterwarnings("ignore:files are decoded again and again")
@pytest.mark.parametrize("kind", WRITERS)
def test_decoded_files_take_no_more_memory_than_they_may(kind: str, tmp_path: Path) -> None:
    for file in range(FILES):
        WRITERS[kind](tmp_path / f"{file:04d}", [_text(file, row) for row in range(ROWS)])
    reader = make_format(kind)
    assert isinstance(reader, Surveyed)
    (tmp_path / "index.json").write_bytes(index_bytes(reader.survey(open_read_folder(tmp_path))))
    file_bytes = ROWS * ROW_BYTES
    unbounded, expected = _most_bytes(tmp_path, None)
    bounded, seen = _most_bytes(tmp_path, LIMIT_BYTES)
    assert {text[:4] for text in expected} == {f"{file:04d}" for file in range(FILES)}
    assert seen == expected, "the order of samples does not depend on the limit"
    assert unbounded > 0.9 * FILES * file_bytes
    assert bounded < LIMIT_BYTES + file_bytes, "little is needed beside: one batch, and lists of members"


def test_a_limit_is_a_size() -> None:
    assert DataConfig(decoded_limit="2GB").decoded_limit_bytes == 2 * 10**9
    assert DataConfig().decoded_limit_bytes is None
    with pytest.raises(ConfigError, match=r"data\.decoded_limit=1024 bytes: must be at least"):
        DataConfig(decoded_limit=1024)
    with pytest.raises(ConfigError, match=r"data\.decoded_limit='much' is no size"):
        DataConfig(decoded_limit="much")
