"""The manifest of saves by one plan: all of its text but what changes from one to the next, made once.

A run that saves every few steps writes the same names, shapes and places each time. Only checksums change, the sizes of
objects and what lies behind them, and what the save says of itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from lightning_dist.checkpoint import manifest as formats
from lightning_dist.checkpoint.manifest import ByteRange, FileEntry, Manifest
from lightning_dist.errors import CheckpointError


class Part(NamedTuple):
    """What one rank has written.

    Attributes:
        file: Name of its file.
        entry: What it is.
        starts: First byte of each item, in the order of its plan.
        sizes: Bytes of each.
        crcs: CRC-32 of each.
    """

    file: str
    entry: FileEntry
    starts: Sequence[int]
    sizes: Sequence[int]
    crcs: Sequence[int]


@dataclass(frozen=True)
class ManifestText:
    """Makes manifests.

    Attributes:
        text: Of tables of objects and tensors, with a gap for each number and file name of a place.
        order: Rank and number of the item of each place, in the order of the text.
    """

    text: str
    order: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, manifest: Manifest, places: Mapping[int, Sequence[ByteRange]]) -> ManifestText:
        """Of all saves that differ from a first one as above.

        Args:
            manifest: Of the first.
            places: Rank -> places of its items in it, in the order of its plan.
        """
        number_of = {_key(place): (rank, n) for rank, own in places.items() for n, place in enumerate(own)}
        order: list[tuple[int, int]] = []

        def gaps(place: ByteRange) -> str:
            order.append(number_of[_key(place)])
            return '"file": %s, "start": %d, "size": %d, "crc32": %d}'

        objects = [f"  {_said(name)}: {{{gaps(place)}" for name, place in manifest.objects.items()]
        tensors = []
        for name, entry in manifest.tensors.items():
            chunks = [
                f'{{"offsets": {_said(each.offsets)}, "sizes": {_said(each.sizes)}, {gaps(each.place)}'
                for each in entry.chunks
            ]
            described = f'"dtype": {_said(entry.dtype)}, "shape": {_said(entry.shape)}, "chunks": [{", ".join(chunks)}]'
            tensors.append(f"  {_said(name)}: {{{described}}}")
        tensors += [f'  {_said(name)}: {{"alias_of": {_said(target)}}}' for name, target in manifest.aliases.items()]
        text = f' "objects": {_table(objects)},\n "tensors": {_table(tensors)}\n}}\n'
        return cls(text, tuple(order))

    def encode(self, parts: Mapping[int, Part], *, save_id: str, created_s: float, record: Mapping[str, Any]) -> bytes:
        """A manifest's bytes.

        Args:
            parts: Rank -> what it has written.
            save_id: See :class:`Manifest`.
            created_s: See :class:`Manifest`.
            record: See :class:`Manifest`.

        Raises:
            CheckpointError: The record holds something that JSON does not know.
        """
        files = [
            f"  {json.dumps(part.file)}: {json.dumps(asdict(part.entry))}"
            for part in sorted(parts.values(), key=lambda part: part.file)
        ]
        head = {"format": formats.FORMAT, "version": formats.VERSION, "save_id": save_id, "created_s": created_s}
        try:
            said = [f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)},\n" for key, value in head.items()]
            said.append(f' "record": {json.dumps(record, allow_nan=False)},\n')
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the record of a checkpoint takes what JSON knows (text, numbers, lists, mappings by text): {error}"
            ) from error
        names = {rank: json.dumps(part.file) for rank, part in parts.items()}
        values: list[Any] = []
        for rank, number in self.order:
            part = parts[rank]
            values += (names[rank], part.starts[number], part.sizes[number], part.crcs[number])
        return f'{{\n{"".join(said)} "files": {_table(files)},\n{self.text % tuple(values)}'.encode()


def _key(place: ByteRange) -> tuple[str, int, int]:
    return place.file, place.start, place.size


def _said(value: Any) -> str:
    """JSON, in a text that takes values in gaps."""
    return json.dumps(value).replace("%", "%%")


def _table(lines: Sequence[str]) -> str:
    return "{\n" + ",\n".join(lines) + "\n }" if lines else "{}"
