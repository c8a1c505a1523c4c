"""Shards that MosaicML Streaming has written; see foreign/README.md."""

import json
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from lightning_dist.data.formats.detection import detect_format
from lightning_dist.data.formats.mds import MdsFormat
from lightning_dist.errors import ForeignDataError, UnreadableShardError
from tests.support.folders import PathFolder, all_samples, open_chunk

FOREIGN = Path(__file__).parent / "foreign"


def _expected(number: int) -> dict[str, Any]:
    return {
        "b": bytes([number]) * number,
        "s": f"sample é {number}",
        "i": -number,
        "u8": number,
        "f32": number / 2,
        "i64": number << 40,
        "si": 10**20 + number,
        "sf": number / 4,
        "sd": Decimal(f"{number}.10"),
        "j": {"n": [number, None, "x"]},
        "a": np.arange(number + 1, dtype=np.int32).reshape(1, number + 1),
        "at": np.arange(300 if number == 3 else number + 1, dtype=np.int16),
        "as": np.full((2, 3), number, dtype=np.float32),
        "img": b"\xff\xd8jpeg%d" % number,
    }


@pytest.mark.parametrize("name", ["mds_plain", "mds_zstd", "mds_gz"])
def test_samples_are_those_that_were_written(name: str, tmp_path: Path) -> None:
    folder = PathFolder(FOREIGN / name)
    assert detect_format(folder) == "mds"
    index = MdsFormat().index(folder)
    assert index.num_samples == 9
    assert index.num_chunks == 4
    for place in (None, tmp_path):
        samples = all_samples(MdsFormat(), FOREIGN / name, index, cache=place)
        for number, sample in enumerate(samples):
            expected = _expected(number)
            assert list(sample) == sorted(expected)
            for column, value in expected.items():
                np.testing.assert_array_equal(sample[column], value, strict=isinstance(value, np.ndarray))


def test_decompressed_shards_are_preferred(tmp_path: Path) -> None:
    shutil.copytree(FOREIGN / "mds_zstd", tmp_path / "both")
    packed = tmp_path / "both" / "shard.00000.mds.zstd"
    packed.with_suffix("").write_bytes(zstandard.ZstdDecompressor().decompress(packed.read_bytes()))
    packed.unlink()
    index = MdsFormat().index(PathFolder(tmp_path / "both"))
    assert index.shards[:2] == ("shard.00000.mds", "shard.00001.mds.zstd")
    assert [sample["i"] for sample in all_samples(MdsFormat(), tmp_path / "both", index)] == [-n for n in range(9)]


def test_pickles_are_refused_before_anything_is_read() -> None:
    with pytest.raises(ForeignDataError, match="column p holds pickles"):
        MdsFormat().index(PathFolder(FOREIGN / "mds_pickle"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda shard: shard.update(compression="snappy"), "compression.*snappy"),
        (lambda shard: shard.update(column_names=["x"] * 14), "different columns"),
        (lambda shard: shard.pop("samples"), "damaged: KeyError"),
        (lambda shard: shard.update(column_encodings=["int3"] * 14), "encoding 'int3'|different columns"),
        (lambda shard: shard.update(version=3), "version"),
    ],
)
def test_what_is_not_read_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    found = json.loads((FOREIGN / "mds_plain" / "index.json").read_text())
    change(found["shards"][1])
    (tmp_path / "index.json").write_text(json.dumps(found))
    with pytest.raises(ForeignDataError, match=message):
        MdsFormat().index(PathFolder(tmp_path))


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ForeignDataError, match=r"is no index of MosaicML Streaming"):
        MdsFormat().index(PathFolder(tmp_path))


def test_damaged_shards_are_named(tmp_path: Path) -> None:
    shutil.copytree(FOREIGN / "mds_plain", tmp_path / "data")
    index = MdsFormat().index(PathFolder(tmp_path / "data"))
    path = tmp_path / "data" / index.shards[0]
    whole = bytearray(path.read_bytes())
    for at, message in ((0, "has 77 samples, and 3"), (4, "cut off, or is damaged"), (4 * 5, "damaged")):
        damaged = whole.copy()
        damaged[at : at + 4] = (77).to_bytes(4, "little") if at == 0 else b"\xff\xff\xff\x0f"
        path.write_bytes(damaged)
        if at < 20:
            with pytest.raises(UnreadableShardError, match=message):
                open_chunk(MdsFormat(), tmp_path / "data", index, 0)
    first = int.from_bytes(whole[4:8], "little")
    damaged = whole.copy()
    damaged[first : first + 4] = b"\xff\xff\x00\x00"
    path.write_bytes(damaged)
    with pytest.raises(UnreadableShardError, match=r"sample 0 of chunk 0 \(shard.00000.mds.* beyond the sample"):
        open_chunk(MdsFormat(), tmp_path / "data", index, 0).sample(0)
