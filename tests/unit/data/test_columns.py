"""Parquet and Arrow: rows as dictionaries, whatever the row groups, batches and compression."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_dist import DataConfig, ShardedLoader, Source
from lightning_dist.data.decoded import Decoded
from lightning_dist.data.formats.arrow import ArrowFormat
from lightning_dist.data.formats.columns import Rows
from lightning_dist.data.formats.parquet import OpenParquet, ParquetFormat
from lightning_dist.data.index.index_file import index_bytes
from lightning_dist.data.placed_bytes import map_place
from lightning_dist.errors import ForeignDataError, UnreadableShardError
from tests.support.folders import PathFolder, all_samples, open_chunk, place_of

TABLE = pa.table(
    {
        "id": pa.array(range(30), pa.int32()),
        "text": [None if number % 7 == 0 else f"é{number}" for number in range(30)],
        "tokens": pa.array([list(range(number % 5)) for number in range(30)], pa.list_(pa.uint16())),
        "vector": pa.array([[number, 0.5] for number in range(30)], pa.list_(pa.float32(), 2)),
        "nested": [{"a": [number], "b": [str(number)]} for number in range(30)],
    }
)


def _write(folder: Path, kind: str) -> None:
    first, second = TABLE.slice(0, 17), TABLE.slice(17)
    if kind == "parquet":
        pq.write_table(first, folder / "0.parquet", row_group_size=4)
        pq.write_table(second, folder / "1.parquet", row_group_size=5, compression="zstd")
        pq.write_table(TABLE.slice(0, 0), folder / "2.parquet")
        return
    with pa.ipc.new_file(folder / "0.arrow", TABLE.schema) as writer:
        writer.write_table(first, max_chunksize=4)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(folder / "1.arrow", TABLE.schema, options=options) as writer:
        writer.write_table(second, max_chunksize=5)


def _format(kind: str, **options: Any) -> Any:
    return {"parquet": ParquetFormat, "arrow": ArrowFormat}[kind](**options)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_rows_are_those_of_the_table(kind: str, tmp_path: Path) -> None:
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    cache.mkdir()
    _write(data, kind)
    index = _format(kind).survey(PathFolder(data), workers=2)
    (data / "index.json").write_bytes(index_bytes(index))
    found = _format(kind).index(PathFolder(data))
    assert found.fingerprint == index.fingerprint
    assert found.samples.tolist() == [17, 13]
    for place in (None, cache):
        rows = all_samples(_format(kind), data, found, cache=place)
        for row, expected in zip(rows, TABLE.to_pylist(), strict=True):
            assert isinstance(row["tokens"], np.ndarray)
            assert row["vector"].dtype == np.float32
            assert {
                key: getattr(value, "tolist", lambda value=value: value)() for key, value in row.items()
            } == expected


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_rows_in_any_order_and_some_columns(kind: str, tmp_path: Path) -> None:
    _write(tmp_path, kind)
    index = _format(kind).survey(PathFolder(tmp_path))
    opened = open_chunk(_format(kind, columns=("text", "id")), tmp_path, index, 0)
    for position in (16, 0, 9, 3, 15, 1):
        assert opened.sample(position) == {"id": position, "text": TABLE["text"][position].as_py()}
    with pytest.raises(IndexError):
        opened.sample(17)
    with pytest.raises(ForeignDataError, match=r"0\.\w+ has no column labels; it has id, text"):
        open_chunk(_format(kind, columns=("labels",)), tmp_path, index, 0)


def test_row_groups_are_decoded_once_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, "parquet")
    index = ParquetFormat().survey(PathFolder(tmp_path))
    opened = open_chunk(ParquetFormat(), tmp_path, index, 0)
    decoded = _decoded(monkeypatch)
    for position in (0, 5, 1, 6, 2, 7, 3, 4, 8, 9):
        opened.sample(position)
    assert decoded == [0, 1, 2]


def test_a_file_that_is_read_in_no_order_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the order of training; with more row groups than two, each sample was decoded by itself."""
    pq.write_table(TABLE, tmp_path / "0.parquet", row_group_size=3)
    (tmp_path / "index.json").write_bytes(index_bytes(ParquetFormat().survey(PathFolder(tmp_path))))
    decoded = _decoded(monkeypatch)
    loader = ShardedLoader(Source(tmp_path), config=DataConfig(batch_size=5, lanes=1), collate=_ids)
    assert sorted(chain.from_iterable(loader)) == list(range(30))
    assert sorted(decoded) == list(range(10))
    loader.close()


def test_row_groups_beyond_memory_are_let_go_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        pq.write_table(TABLE.slice(15 * number, 15), tmp_path / f"{number}.parquet", row_group_size=3)
    index = ParquetFormat().survey(PathFolder(tmp_path))
    one_group = Rows(TABLE.slice(0, 3), None).size_bytes
    held = Decoded(7 * one_group)
    files = [
        OpenParquet(
            map_place(place_of(tmp_path, index.chunk(number)), index.chunk(number)), index.chunk(number), None, held
        )
        for number in range(2)
    ]
    decoded = _decoded(monkeypatch)
    for position in range(0, 15, 3):
        assert [file.sample(position)["id"] for file in files] == [position, 15 + position]
    assert decoded == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert one_group < held.size_bytes <= 7 * one_group
    with pytest.warns(UserWarning, match="decoded again and again"):
        files[0].sample(0)
    files[1].sample(0)
    assert decoded[10:] == [0, 0]
    files[0].close()
    del files
    assert held.size_bytes == 0


def _decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Row groups, as they are decoded from now on."""
    decoded: list[int] = []
    read = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda self, number, **kw: decoded.append(number) or read(self, number, **kw)
    )
    return decoded


def _ids(samples: list[dict[str, Any]]) -> list[int]:
    return [sample["id"] for sample in samples]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_damaged_files_are_named(kind: str, tmp_path: Path) -> None:
    _write(tmp_path, kind)
    index = _format(kind).survey(PathFolder(tmp_path))
    path = tmp_path / index.shards[0]
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"x" * len(whole)):
        path.write_bytes(damaged)
        chunk = index.chunk(0)._replace(size_bytes=len(damaged))
        with pytest.raises(UnreadableShardError, match=rf"0\.{kind}"):
            _format(kind).open(place_of(tmp_path, chunk), chunk, index.properties, Decoded())
        with pytest.raises(UnreadableShardError, match=rf"0\.{kind} cannot be read"):
            _format(kind).survey(PathFolder(tmp_path))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_missing_package_says_what_to_install(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ForeignDataError, match=r"pip install pyarrow.*lightning-dist\[data\]"):
        _format(kind).index(PathFolder(tmp_path))
