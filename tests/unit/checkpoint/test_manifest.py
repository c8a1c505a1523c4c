"""The manifest says the same after a round trip, and what is wrong with one is said by file and field."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from lightning_dist.checkpoint.manifest import (
    ByteRange,
    Chunk,
    FileEntry,
    Manifest,
    Marker,
    TensorEntry,
    encode,
    parse,
    parse_marker,
)
from lightning_dist.checkpoint.save_ids import next_save_id
from lightning_dist.errors import CheckpointError, DamagedCheckpointError, ForeignCheckpointError

SAVE = next_save_id([], now_s=12.5, token=7)


def manifest(**changes: Any) -> Manifest:
    chunks = (
        Chunk((0, 0), (2, 3), ByteRange("a.bin", 0, 24, 5)),
        Chunk((2, 0), (1, 3), ByteRange("b.bin", 64, 12, 6)),
    )
    values: dict[str, Any] = {
        "tensors": {"w": TensorEntry("float32", (3, 3), chunks), "e": TensorEntry("bool", (0,), ())},
        "aliases": {"head": "w"},
        "objects": {"rng/0": ByteRange("a.bin", 24, 6, 7)},
        "files": {"a.bin": FileEntry(30, 1, 0, "h"), "b.bin": FileEntry(76, 2, 1, "g")},
        "save_id": "abc",
        "created_s": 12.5,
        "record": {"step": 4, "topology": {"hosts": ["h", "g"]}},
    }
    return Manifest(**{**values, **changes})


def test_a_round_trip_changes_nothing() -> None:
    assert parse(encode(manifest()), "x/manifest.json") == manifest()
    assert parse(encode(manifest()), "m").tensor("head") == manifest().tensors["w"]


def changed(path: str, value: Any) -> bytes:
    body = json.loads(encode(manifest()))
    *parents, last = path.split("|")
    place: Any = body
    for key in parents:
        place = place[int(key) if key.isdigit() else key]
    if value is None:
        del place[last]
    else:
        place[int(last) if last.isdigit() else last] = value
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("tensors|w|dtype", "float31", r"tensors\['w'\].dtype is 'float31'"),
        ("tensors|w|dtype", "float64", r"tensors\['w'\].chunks\[0\].size is 24; .* takes 48"),
        ("tensors|w|shape", [3, -1], r"tensors\['w'\].shape is \[3, -1\], not a list of whole"),
        ("tensors|w|shape", [4, 3], r"held once and whole: w \[4, 3\]: blocks hold 9 of 12"),
        ("tensors|w|chunks|1|offsets", [1, 0], r"overlap"),
        ("tensors|w|chunks|1|offsets", [3, 0], r"chunks\[1\].offsets .* reaches out"),
        ("tensors|w|chunks|1|start", 65, r"chunks\[1\].size reaches beyond the 76 bytes of b.bin"),
        ("tensors|w|chunks|1|file", "c.bin", r"chunks\[1\].file is 'c.bin', which files does not list"),
        ("tensors|w|chunks|1|crc32", None, r"chunks\[1\].crc32 is missing"),
        ("tensors|w|chunks|1|crc32", True, r"chunks\[1\].crc32 is 'True', not a whole number"),
        ("tensors|w|chunks|1", 3, r"chunks\[1\] is '3', not an object"),
        ("tensors|head|alias_of", "v", r"tensors\['head'\].alias_of is 'v', which is not stored"),
        ("files|../x", {"size": 1, "crc32": 1, "rank": 0, "host": ""}, r"files\['../x'\]\s+is no name of a file"),
        ("files|a.bin|size", -3, r"files\['a.bin'\].size is -3, less than 0"),
        ("objects|rng/0|size", 7, r"objects\['rng/0'\].size reaches beyond the 30 bytes"),
        ("save_id", None, r"save_id is missing"),
        ("record", [], r"record is '\[\]', not an object"),
        ("created_s", "now", r"created_s is 'now', not a number"),
    ],
)
def test_an_error_names_the_file_and_the_field(path: str, value: Any, message: str) -> None:
    with pytest.raises(DamagedCheckpointError, match=message) as caught:
        parse(changed(path, value), "x/manifest.json")
    assert str(caught.value).startswith("x/manifest.json: ")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"a": 1', b"[" * 100_000])
def test_what_is_no_json_object_is_said(data: bytes) -> None:
    for read in (parse, parse_marker):
        with pytest.raises(DamagedCheckpointError, match="x/f "):
            read(data, "x/f")


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda b: b.update(version=1), "version is 1, this release reads 2"), (lambda b: b.update(format="x"), "format")],
)
def test_another_version_or_format_is_foreign(change: Callable[[dict[str, Any]], None], message: str) -> None:
    for data, read in ((encode(manifest()), parse), (Marker.of(SAVE, b"m").encode(), parse_marker)):
        body = json.loads(data)
        change(body)
        with pytest.raises(ForeignCheckpointError, match=message):
            read(json.dumps(body).encode(), "x/f")


def test_a_marker_with_any_bit_changed_is_found() -> None:
    good = Marker.of(SAVE, b"manifest").encode()
    assert parse_marker(good, "m") == Marker.of(SAVE, b"manifest")
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        try:
            assert parse_marker(bytes(bad), "m") != Marker.of(SAVE, b"manifest")
        except CheckpointError:
            continue


def test_what_is_not_held_once_is_not_written() -> None:
    half = TensorEntry("float32", (3, 3), manifest().tensors["w"].chunks[:1])
    with pytest.raises(CheckpointError, match=r"w \[3, 3\]: blocks hold 6 of 9"):
        encode(manifest(tensors={"w": half}, aliases={}))
    with pytest.raises(CheckpointError, match="takes what JSON knows"):
        encode(manifest(record={"model": object()}))
    with pytest.raises(CheckpointError, match="takes what JSON knows"):
        encode(manifest(record={"loss": float("nan")}))


def test_ten_thousand_ranks() -> None:
    rng = random.Random(0)
    files = {f"r{rank}": FileEntry(4096, rng.getrandbits(32), rank, "h") for rank in range(10_000)}
    chunks = tuple(Chunk((8 * r,), (8,), ByteRange(f"r{r}", 0, 32, 1)) for r in range(10_000))
    big = manifest(tensors={"w": TensorEntry("float32", (80_000,), chunks)}, aliases={}, objects={}, files=files)
    assert parse(encode(big), "m") == big
