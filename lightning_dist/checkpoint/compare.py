"""What differs between two checkpoints, by their manifests and, where chunks are cut alike, by their checksums."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_dist.checkpoint.catalog import Checkpoint
from lightning_dist.checkpoint.manifest import TensorEntry
from lightning_dist.checkpoint.whole import read_tensor


@dataclass(frozen=True)
class Difference:
    """Something that differs.

    Attributes:
        name: Of the tensor or object.
        first: What the first checkpoint holds, in words.
        second: What the second holds.
    """

    name: str
    first: str
    second: str


def compare(first: Checkpoint, second: Checkpoint, *, values: bool = True) -> list[Difference]:
    """What differs: names, types, shapes, and the values of tensors; objects by name and bytes.

    Args:
        first: A checkpoint.
        second: Another, of any world size and layout.
        values: Compare values too. Only tensors whose chunks were cut differently are read, one at a time.
    """
    differences = []
    a, b = first.manifest, second.manifest
    for name in dict.fromkeys([*a.tensor_names, *b.tensor_names]):
        one = a.tensor(name) if name in a.tensor_names else None
        other = b.tensor(name) if name in b.tensor_names else None
        if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
            differences.append(Difference(name, _text(one), _text(other)))
        elif values and not _same(first, second, name, one, other):
            differences.append(Difference(name, _text(one), "other values"))
    for name in dict.fromkeys([*a.objects, *b.objects]):
        place, else_place = a.objects.get(name), b.objects.get(name)
        if place is None or else_place is None:
            differences.append(Difference(name, *("-" if p is None else "object" for p in (place, else_place))))
        elif values and (place.size, place.crc32) != (else_place.size, else_place.crc32):
            differences.append(Difference(name, f"object of {place.size} bytes", f"other, of {else_place.size} bytes"))
    return differences


def _same(first: Checkpoint, second: Checkpoint, name: str, one: TensorEntry, other: TensorEntry) -> bool:
    sums = [
        {(chunk.offsets, chunk.sizes): chunk.place.crc32 for chunk in entry.chunks if chunk.place.size}
        for entry in (one, other)
    ]
    if sums[0].keys() == sums[1].keys():
        return sums[0] == sums[1]
    a, b = read_tensor(first, name), read_tensor(second, name)
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _text(entry: TensorEntry | None) -> str:
    return "-" if entry is None else f"{entry.dtype}{list(entry.shape)}"
