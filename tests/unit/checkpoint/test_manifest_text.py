"""Manifests of saves by one plan: their text is that of a manifest made anew."""

from __future__ import annotations

import pytest

from lightning_dist.checkpoint import manifest as formats
from lightning_dist.checkpoint.manifest import ByteRange, Chunk, FileEntry, Manifest, TensorEntry
from lightning_dist.checkpoint.manifest_text import ManifestText, Part
from lightning_dist.checkpoint.save_ids import next_save_id, shard_file
from lightning_dist.errors import CheckpointError

FIRST, LATER = (next_save_id((), now_s=number, token=0) for number in (1, 2))


def places(save_id: str, *, object_bytes: int, crc: int) -> dict[int, list[ByteRange]]:
    """Of two ranks: tensors, one empty and one with a name that looks like a format, and an object each."""
    first, second = shard_file(0, save_id), shard_file(1, save_id)
    return {
        0: [
            ByteRange(first, 0, 8, crc),
            ByteRange(first, 64, object_bytes, crc + 1),
            ByteRange(first, 64 + object_bytes, 0, 0),
        ],
        1: [ByteRange(second, 0, 4, crc + 2), ByteRange(second, 64, object_bytes + 3, crc + 3)],
    }


def manifest_of(save_id: str, placed: dict[int, list[ByteRange]], record: dict[str, object]) -> Manifest:
    (whole, own, nothing), (rest, other) = placed[0], placed[1]
    return Manifest(
        tensors={
            "a %d": TensorEntry("float32", (3,), (Chunk((0,), (2,), whole), Chunk((2,), (1,), rest))),
            "empty": TensorEntry("int64", (0, 3), (Chunk((0, 0), (0, 3), nothing),)),
        },
        aliases={"b": "a %d"},
        objects={"rank/0": own, "rank/1 100%": other},
        files={
            own.file: FileEntry(nothing.start, 11, 0, "host%s"),
            other.file: FileEntry(other.start + other.size, 12, 1, "h2"),
        },
        save_id=save_id,
        created_s=2.5,
        record=record,
    )


def test_it_is_the_text_of_a_manifest_made_anew() -> None:
    first = places(FIRST, object_bytes=5, crc=100)
    text = ManifestText.of(manifest_of(FIRST, first, {}), first)
    for save_id, object_bytes, crc in ((FIRST, 5, 100), (LATER, 70, 200)):
        later = places(save_id, object_bytes=object_bytes, crc=crc)
        record = {"step": 3, "note": "50 %", "hosts": ["a", "b"]}
        expected = manifest_of(save_id, later, record)
        parts = {
            rank: Part(
                own[0].file,
                expected.files[own[0].file],
                [place.start for place in own],
                [place.size for place in own],
                [place.crc32 for place in own],
            )
            for rank, own in later.items()
        }
        data = text.encode(parts, save_id=save_id, created_s=2.5, record=record)
        assert data.decode() == formats.encode(expected).decode()
        assert formats.parse(data, "manifest") == expected
    with pytest.raises(CheckpointError, match="what JSON knows"):
        text.encode(parts, save_id=LATER, created_s=2.5, record={"step": float("nan")})
