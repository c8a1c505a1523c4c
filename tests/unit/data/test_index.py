"""Indexes that say what cannot be: none may give wrong samples, or an error that is no :class:`ForeignDataError`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_dist.data.formats.tokens import TokensFormat
from lightning_dist.data.index.dataset_index import KIND, VERSION
from lightning_dist.data.index.index_file import INDEX_NAME
from lightning_dist.data.loading.source import Source
from lightning_dist.errors import ForeignDataError


def described(*, properties: Any = None, shards: Any = ("a.bin",), **columns: Any) -> str:
    chunks = {"shard": [0] * 3, "start": [0, 8, 16], "size_bytes": [10] * 3, "samples": [1] * 3, "crc32": None}
    return json.dumps(
        {
            "kind": KIND,
            "version": VERSION,
            "format": "tokens",
            "properties": {"dtype": "uint16", "seq_len": 4} if properties is None else properties,
            "shards": shards,
            "chunks": {**chunks, **columns},
        }
    )


NAN = float("nan")


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(described(start=[0, 2.5, 16]), id="a fraction"),
        pytest.param(described(start=[0, "8", 16]), id="text"),
        pytest.param(described(start=[0, True, 16]), id="a truth value"),
        pytest.param(described(start=[0, NAN, 16]), id="no number"),
        pytest.param(described(start=[0, None, 16]), id="nothing"),
        pytest.param(described(start=[0, [8], 16]), id="a list"),
        pytest.param(described(start=[0, -8, 16]), id="negative"),
        pytest.param(described(samples=[1, 1 << 63, 1]), id="too large"),
        pytest.param(described(samples=[1 << 62] * 3), id="samples that overflow"),
        pytest.param(described(size_bytes=[(1 << 63) - 1] * 3), id="bytes that overflow"),
        pytest.param(described(start=[0, 8, (1 << 63) - 1]), id="an end that overflows"),
        pytest.param(described(shard=[0, 1, 0]), id="a shard that is not named"),
        pytest.param(described(shards=["../a.bin"]), id="a shard elsewhere"),
        pytest.param(described(shards=["a\0.bin"]), id="a name with a zero byte"),
        pytest.param(described(shards=["a\ud800.bin"]), id="a name that is no text"),
        pytest.param(described(properties=[1]), id="properties that are a list"),
        pytest.param(described(properties={"dtype": ["uint16"], "seq_len": 4}), id="a type that is a list"),
        pytest.param(described(properties={"dtype": "uint16", "seq_len": True}), id="a length that is a truth value"),
        pytest.param("[" * 100_000, id="deeper than can be read"),
        pytest.param("{", id="cut off"),
    ],
)
def test_an_index_that_cannot_be_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX_NAME).write_text(index)
    with pytest.raises(ForeignDataError):
        _ = Source(tmp_path, format="tokens").index


@pytest.mark.parametrize("more", [{}, {"shard_tokens": [13, 13]}, {"shard_tokens": ["13"]}, {"shard_tokens": [-13]}])
def test_another_length_needs_the_numbers_of_tokens(tmp_path: Path, more: dict[str, Any]) -> None:
    (tmp_path / INDEX_NAME).write_text(described(properties={"dtype": "uint16", "seq_len": 4, **more}))
    assert Source(tmp_path, format="tokens").index.num_samples == 3
    with pytest.raises(ForeignDataError, match="seq_len=4"):
        _ = Source(tmp_path, format=TokensFormat(seq_len=2)).index
