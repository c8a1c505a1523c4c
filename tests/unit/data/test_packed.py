"""Packed documents as samples of token shards."""

from pathlib import Path

import numpy as np
import pytest

from lightning_dist.data.formats.packed import PackedFormat
from lightning_dist.data.index.dataset_index import DatasetIndex
from lightning_dist.data.index.index_file import index_bytes
from lightning_dist.data.packing import IGNORED
from lightning_dist.errors import ConfigError, ForeignDataError, UnreadableShardError
from tests.support.folders import PathFolder, all_samples, open_chunk

EOS = 0


def _write(folder: Path) -> list[list[int]]:
    """Two shards of documents, the last without its end."""
    random = np.random.default_rng(1)
    documents = [[*random.integers(1, 200, size).tolist(), EOS] for size in random.integers(1, 40, 60)]
    documents[-1].pop()
    for name, part in (("a.bin", documents[:31]), ("b.bin", documents[31:])):
        np.concatenate(part).astype("<u2").tofile(folder / name)
    return documents


def _index(folder: Path) -> DatasetIndex:
    index = PackedFormat(seq_len=32, eos=EOS, dtype="uint16", chunk_bytes=400).survey(PathFolder(folder), workers=2)
    (folder / "packed.json").write_bytes(index_bytes(index))
    return index


def test_rows_hold_every_token_of_every_document_once(tmp_path: Path) -> None:
    documents = _write(tmp_path)
    index = _index(tmp_path)
    assert index.num_chunks > 4
    read = PackedFormat().index(PathFolder(tmp_path))
    assert read.fingerprint == index.fingerprint
    cache = tmp_path / "cache"
    cache.mkdir()
    rows = all_samples(PackedFormat(), tmp_path, read, cache=cache)
    assert len(rows) == index.num_samples
    parts = []
    for row in rows:
        assert {len(column) for column in row} == {32}
        for number in range(int(row.document_ids.max()) + 1):
            parts.append(row.tokens[row.document_ids == number].tolist())
    short = sorted(document for document in documents if len(document) <= 32)
    assert sorted(part for part in parts if part in short) == short
    assert sum(len(part) for part in parts) == sum(map(len, documents))
    predicted = sum(int((row.targets != IGNORED).sum()) for row in rows)
    assert predicted == sum(len(document) - 1 for document in documents)
    assert index.properties["tokens"] == sum(map(len, documents))


def test_length_and_end_come_from_the_index_of_windows(tmp_path: Path) -> None:
    _write(tmp_path)
    with pytest.raises(ConfigError, match="--seq-len 1024 --eos"):
        PackedFormat(dtype="uint16").survey(PathFolder(tmp_path))
    with pytest.raises(ForeignDataError, match=r"no packed.json.*--format packed"):
        PackedFormat().index(PathFolder(tmp_path))
    _index(tmp_path)
    with pytest.raises(ForeignDataError, match="rows of 32, not 64"):
        PackedFormat(seq_len=64).index(PathFolder(tmp_path))


def test_tokens_that_end_no_document_are_refused(tmp_path: Path) -> None:
    _write(tmp_path)
    for eos, error, message in (
        (70_000, ConfigError, "tokens here are uint16"),
        (-1, ConfigError, "tokens here are uint16"),
        (300, ForeignDataError, "nowhere has the token 300"),
    ):
        with pytest.raises(error, match=message):
            PackedFormat(seq_len=32, eos=eos, dtype="uint16").survey(PathFolder(tmp_path))


def test_shard_that_was_written_anew_is_found_out(tmp_path: Path) -> None:
    _write(tmp_path)
    index = _index(tmp_path)
    data = np.fromfile(tmp_path / "a.bin", dtype="<u2")
    data[:] = 5
    data[19::20] = EOS  # of which a row holds one
    data.tofile(tmp_path / "a.bin")
    with pytest.raises(UnreadableShardError, match="rows of packed documents"):
        open_chunk(PackedFormat(), tmp_path, index, 0)
