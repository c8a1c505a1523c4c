"""Every format at a URL, through the cache: the samples are those of the same files on disk."""

import gzip
import io
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lightning_dist.data.cache.cached_chunks import CacheOptions, open_chunks
from lightning_dist.data.decoded import Decoded
from lightning_dist.data.formats import Surveyed, make_format
from lightning_dist.data.formats.detection import detect_format
from lightning_dist.data.index.index_file import INDEX_NAME, PACKED_NAME, index_bytes
from lightning_dist.data.reading import open_chunk
from lightning_dist.data.storage.output import open_write_folder
from lightning_dist.data.storage.shards import open_read_folder
from tests.support.folders import all_samples

FOREIGN = Path(__file__).parent / "foreign"
TABLE = pa.table({"id": list(range(20)), "tokens": [list(range(number)) for number in range(20)]})


def _tokens(folder: Path) -> None:
    np.asarray([5, 6, 0, 7, 0, 8, 9, 9, 9, 0] * 30, dtype="<u2").tofile(folder / "a.bin")


def _jsonl(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(b'{"a": 1}\n' * 40)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"2\n3\n"))


def _tar(folder: Path) -> None:
    with tarfile.open(folder / "a.tar", "w") as tar:
        for number in range(5):
            info = tarfile.TarInfo(f"{number}.txt")
            info.size = number
            tar.addfile(info, io.BytesIO(b"x" * number))


def _arrow(folder: Path) -> None:
    with pa.ipc.new_file(folder / "a.arrow", TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=6)


MADE: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "tokens": (_tokens, {"seq_len": 10, "dtype": "uint16", "chunk_bytes": 200}),
    "packed": (_tokens, {"seq_len": 10, "dtype": "uint16", "chunk_bytes": 200, "eos": 0}),
    "jsonl": (_jsonl, {"chunk_bytes": 100}),
    "tar": (_tar, {}),
    "parquet": (lambda folder: pq.write_table(TABLE, folder / "a.parquet", row_group_size=7), {}),
    "arrow": (_arrow, {}),
    "mds": (lambda folder: shutil.copytree(FOREIGN / "mds_zstd", folder, dirs_exist_ok=True), {}),
    "litdata": (lambda folder: shutil.copytree(FOREIGN / "litdata_zstd", folder, dirs_exist_ok=True), {}),
}


@pytest.mark.parametrize("name", MADE)
def test_samples_are_those_of_the_files_on_disk(name: str, tmp_path: Path) -> None:
    make, options = MADE[name]
    local = tmp_path / "local"
    local.mkdir()
    make(local)
    url = f"memory://{tmp_path.name}/{name}"
    fsspec.filesystem("memory").put(f"{local}/", f"/{tmp_path.name}/{name}/", recursive=True)
    remote, on_disk = open_read_folder(url), open_read_folder(local)
    assert detect_format(remote) == ("tokens" if name == "packed" else name)
    surveyor = make_format(name, **options)
    if isinstance(surveyor, Surveyed):
        index = surveyor.survey(remote, workers=2)
        assert index.fingerprint == surveyor.survey(on_disk).fingerprint
        open_write_folder(url).write(PACKED_NAME if name == "packed" else INDEX_NAME, index_bytes(index))
    reader = make_format(name)
    index = reader.index(remote)
    expected = all_samples(reader, local, index)
    assert expected
    chunks = open_chunks(remote, index, options=CacheOptions(folder=tmp_path / "cache", limit_bytes=1 << 20))
    try:
        decoded = Decoded()
        opened = [
            open_chunk(chunks, reader, index.chunk(n), index.properties, decoded) for n in range(index.num_chunks)
        ]
        samples = [
            chunk.sample(position)
            for chunk, size in zip(opened, index.samples.tolist(), strict=True)
            for position in range(size)
        ]
    finally:
        chunks.close()
    assert _plain(samples) == _plain(expected)


def _plain(value: Any) -> Any:
    """With arrays and tensors as lists, so that samples can be compared."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic, torch.Tensor)) else value
