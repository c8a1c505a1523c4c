"""JSONL: lines are samples, in chunks that end with a line, or in compressed shards."""

import bz2
import gzip
import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
import zstandard
from hypothesis import given

from lightning_dist.data.decoded import Decoded
from lightning_dist.data.formats.jsonl import JsonlFormat, line_bounds
from lightning_dist.data.index.index_file import index_bytes
from lightning_dist.errors import ForeignDataError, UnreadableShardError
from tests.support.folders import PathFolder, all_samples, open_chunk, place_of

SAMPLES = [{"id": number, "text": "é" * number, "nested": [None, {"a": 1.5}]} for number in range(50)]


def _lines(samples: list[object]) -> bytes:
    return b"".join(json.dumps(sample, ensure_ascii=False).encode() + b"\n" for sample in samples)


@given(st.lists(st.sampled_from([b"1", b"[2]", b"", b" ", b" 3", b"\r", b"\t\t", b"4\r"])), st.booleans())
def test_line_bounds_are_those_of_split(lines: list[bytes], ends: bool) -> None:
    data = b"\n".join(lines) + b"\n" * ends
    starts, stops = line_bounds(data)
    expected = [line for line in data.split(b"\n") if line.strip()]
    assert [data[start:stop] for start, stop in zip(starts, stops, strict=True)] == expected


def test_all_kinds_of_files_together(tmp_path: Path) -> None:
    data, cache = tmp_path / "data", tmp_path / "cache"
    (data / "more").mkdir(parents=True)
    cache.mkdir()
    frames = [zstandard.ZstdCompressor().compress(_lines(SAMPLES[start : start + 5])) for start in (30, 35)]
    (data / "a.jsonl").write_bytes(b"\n" + _lines(SAMPLES[:20]) + b"  \n\r\n" + json.dumps(SAMPLES[20]).encode())
    (data / "b.jsonl.gz").write_bytes(gzip.compress(_lines(SAMPLES[21:25])) + gzip.compress(_lines(SAMPLES[25:30])))
    (data / "c.jsonl.zst").write_bytes(b"".join(frames))
    (data / "d.ndjson.bz2").write_bytes(bz2.compress(_lines(SAMPLES[40:45])))
    (data / "more" / "e.jsonl").write_bytes(_lines(SAMPLES[45:]))
    (data / "f.jsonl").write_bytes(b"")
    index = JsonlFormat(chunk_bytes=300).survey(PathFolder(data), workers=3)
    (data / "index.json").write_bytes(index_bytes(index))
    found = JsonlFormat().index(PathFolder(data))
    assert found.fingerprint == index.fingerprint
    assert found.num_chunks > 8
    assert index.crc32 is not None
    for place in (None, cache):
        assert all_samples(JsonlFormat(), data, found, cache=place) == SAMPLES


@pytest.mark.parametrize("ending", ["gz", "zst", "bz2"])
def test_cut_off_compressed_shards_are_named(ending: str, tmp_path: Path) -> None:
    compress = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress, "bz2": bz2.compress}[ending]
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(compress(_lines(SAMPLES)))
    index = JsonlFormat().survey(PathFolder(tmp_path))
    whole = path.read_bytes()
    for damaged in (whole[:-20], b"x" * len(whole)):
        path.write_bytes(damaged)
        with pytest.raises(UnreadableShardError, match=rf"a\.jsonl\.{ending} cannot be read"):
            JsonlFormat().survey(PathFolder(tmp_path))
        chunk = index.chunk(0)._replace(size_bytes=len(damaged))
        with pytest.raises(UnreadableShardError, match=rf"a\.jsonl\.{ending}.* cannot be decompressed"):
            JsonlFormat().open(place_of(tmp_path, chunk), chunk, index.properties, Decoded())


def test_lines_that_are_not_json_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"1\n{\n3\n")
    index = JsonlFormat().survey(PathFolder(tmp_path))
    opened = open_chunk(JsonlFormat(), tmp_path, index, 0)
    assert opened.sample(2) == 3
    with pytest.raises(UnreadableShardError, match=r"line 1 of chunk 0 \(a.jsonl"):
        opened.sample(1)
    with pytest.raises(IndexError):
        opened.sample(3)


def test_changed_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ForeignDataError, match=r"no files of the format jsonl"):
        JsonlFormat().survey(PathFolder(tmp_path))
    (tmp_path / "a.jsonl").write_bytes(b"1\n2\n3\n")
    with pytest.raises(ForeignDataError, match="hierdist data index"):
        JsonlFormat().index(PathFolder(tmp_path))
    index = JsonlFormat().survey(PathFolder(tmp_path))
    (tmp_path / "a.jsonl").write_bytes(b"1\n2222")
    with pytest.raises(UnreadableShardError, match="2 lines, and 3 by the index"):
        open_chunk(JsonlFormat(), tmp_path, index, 0)
