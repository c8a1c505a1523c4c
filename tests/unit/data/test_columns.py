"""Parquet and Arrow: rows as dictionaries, whatever the row groups, batches and compression."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_dist.data.formats.arrow import ArrowFormat
from lightning_dist.data.formats.parquet import ParquetFormat
from lightning_dist.data.index_file import index_bytes
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
    decoded: list[int] = []
    read = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda self, number, **kw: decoded.append(number) or read(self, number, **kw)
    )
    for position in (0, 5, 1, 6, 2, 7, 3, 4, 8, 9):
        opened.sample(position)
    assert decoded == [0, 1, 2]


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
            _format(kind).open(place_of(tmp_path, chunk), chunk, index.properties)
        with pytest.raises(UnreadableShardError, match=rf"0\.{kind} cannot be read"):
            _format(kind).survey(PathFolder(tmp_path))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_missing_package_says_what_to_install(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ForeignDataError, match=r"pip install pyarrow.*lightning-dist\[data\]"):
        _format(kind).index(PathFolder(tmp_path))
