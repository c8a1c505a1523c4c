"""Chunks that LitData has written; see foreign/README.md."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dist.data.formats.detection import detect_format
from lightning_dist.data.formats.litdata import LitDataFormat
from lightning_dist.errors import ForeignDataError, UnreadableShardError
from tests.support.folders import PathFolder, all_samples, open_chunk

FOREIGN = Path(__file__).parent / "foreign"


def _check(sample: Any, number: int) -> None:
    assert list(sample) == ["i", "f", "s", "b", "flag", "v", "m", "a", "a1", "pair"]
    plain = {key: sample[key] for key in ("i", "f", "s", "b", "flag", "pair")}
    assert plain == {
        "i": number,
        "f": number / 4,
        "s": f"é {number}",
        "b": bytes([number]) * number,
        "flag": number % 2 == 0,
        "pair": (number, [f"x{number}", number]),
    }
    assert torch.equal(sample["v"], torch.arange(number + 1))
    assert torch.equal(sample["m"], torch.full((2, 2), float(number)))
    np.testing.assert_array_equal(sample["a"], np.full((2, number + 1), number, dtype=np.int32), strict=True)
    np.testing.assert_array_equal(sample["a1"], np.arange(number, dtype=np.float32), strict=True)


@pytest.mark.parametrize("name", ["litdata_plain", "litdata_zstd"])
def test_samples_are_those_that_were_written(name: str, tmp_path: Path) -> None:
    folder = PathFolder(FOREIGN / name)
    assert detect_format(folder) == "litdata"
    index = LitDataFormat().index(folder)
    assert index.samples.tolist() == [4, 4, 2]
    for place in (None, tmp_path):
        for number, sample in enumerate(all_samples(LitDataFormat(), FOREIGN / name, index, cache=place)):
            _check(sample, number)


def test_pickles_are_refused_before_anything_is_read() -> None:
    with pytest.raises(ForeignDataError, match=r"hold pickles.*litdata\.optimize"):
        LitDataFormat().index(PathFolder(FOREIGN / "litdata_pickle"))


def test_compression_of_parts_says_how_to_convert() -> None:
    with pytest.raises(ForeignDataError, match=r"each batch.*compression_level='chunk'"):
        LitDataFormat().index(PathFolder(FOREIGN / "litdata_batch"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"item_loader": "TokensLoader"}, "TokensLoader.*format tokens"),
        ({"encryption": {"algorithm": "fernet"}}, "encrypted"),
        ({"data_format": ["json"] * 12}, "samples hold 'json'"),
        ({"data_format": ["int"]}, "names 1 leaves, and samples have 12"),
        ({"data_spec": "[1"}, "damaged: JSONDecodeError"),
        (
            {"data_spec": '[1, {"type": "collections.OrderedDict", "context": "[]", "children_spec": []}]'},
            "class collections.OrderedDict",
        ),
    ],
)
def test_what_is_not_read_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    found = json.loads((FOREIGN / "litdata_plain" / "index.json").read_text())
    found["config"].update(change)
    (tmp_path / "index.json").write_text(json.dumps(found))
    with pytest.raises(ForeignDataError, match=message):
        LitDataFormat().index(PathFolder(tmp_path))


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ForeignDataError, match="no index of LitData"):
        LitDataFormat().index(PathFolder(tmp_path))
    shutil.copytree(FOREIGN / "litdata_plain", tmp_path / "data")
    index = LitDataFormat().index(PathFolder(tmp_path / "data"))
    path = tmp_path / "data" / "chunk-0-0.bin"
    whole = bytearray(path.read_bytes())
    first = int.from_bytes(whole[4:8], "little")
    whole[first : first + 4] = b"\xff\xff\x00\x00"
    path.write_bytes(whole)
    with pytest.raises(UnreadableShardError, match=r"sample 0 of chunk 0 \(chunk-0-0.bin.* damaged"):
        open_chunk(LitDataFormat(), tmp_path / "data", index, 0).sample(0)
    path.write_bytes(whole[:-40])
    with pytest.raises(UnreadableShardError, match="cut off"):
        open_chunk(LitDataFormat(), tmp_path / "data", index, 0)
    path.unlink()
    with pytest.raises(UnreadableShardError, match=r"lacks 1 files .* chunk-0-0.bin"):
        LitDataFormat().index(PathFolder(tmp_path / "data"))
