"""What a checkpoint says of itself: which bytes of which file are which block of which tensor. JSON to and from.

Pure. What is read is checked as it is parsed, so that everything behind :func:`parse` may trust a manifest: types,
ranges inside their files, sizes that follow from shapes, blocks that make up their tensors. An error names the file and
the field. The commit marker, :class:`Marker`, is here too: it vouches for the bytes of the manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_dist.checkpoint import coverage
from lightning_dist.checkpoint.fields import Fields
from lightning_dist.checkpoint.pieces import ELEMENT_BYTES, Piece
from lightning_dist.checkpoint.save_ids import is_manifest, is_save_id
from lightning_dist.errors import CheckpointError, DamagedCheckpointError, ForeignCheckpointError

FORMAT = "lightning_dist.checkpoint"
VERSION = 2
"""1 had a manifest of one name for all saves, and a marker that did not say which save it is of."""
_TABLES = ("files", "objects", "tensors")
MARKER_FILE = "COMMITTED"
TWIN = "twin"
"""Entry of a record that is the same in memory and in storage if both have the same values."""


@dataclass(frozen=True)
class ByteRange:
    """Bytes of a file, and their checksum.

    Attributes:
        file: A key of :attr:`Manifest.files`.
        start: First byte.
        size: In bytes.
        crc32: Of these bytes.
    """

    file: str
    start: int
    size: int
    crc32: int


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor and its bytes: the values in row-major order, little-endian."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: ByteRange


@dataclass(frozen=True)
class TensorEntry:
    """A tensor; its chunks hold each value once."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all values."""
        return sum(chunk.place.size for chunk in self.chunks)


@dataclass(frozen=True)
class FileEntry:
    """A file, and who wrote it.

    Attributes:
        size: In bytes.
        crc32: Of the whole file.
        rank: Global rank of the writer.
        host: Its host.
    """

    size: int
    crc32: int
    rank: int
    host: str


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint holds.

    Attributes:
        tensors: Name -> tensor.
        aliases: Name of a tensor tied to another -> the name that it is stored under.
        objects: Name -> where it is.
        files: Name of a file in the checkpoint's folder -> what it should be.
        save_id: Differs between any two saves.
        created_s: When it was committed, seconds since 1970 by the coordinator's clock.
        record: For humans and for choosing a checkpoint: world size, topology, config, ``step``, ``epoch``, versions.
    """

    tensors: Mapping[str, TensorEntry]
    aliases: Mapping[str, str]
    objects: Mapping[str, ByteRange]
    files: Mapping[str, FileEntry]
    save_id: str
    created_s: float
    record: Mapping[str, Any] = field(default_factory=dict)

    def tensor(self, name: str) -> TensorEntry:
        """The tensor of a name, tied or not; ``KeyError`` if there is none."""
        return self.tensors[self.aliases.get(name, name)]

    @property
    def tensor_names(self) -> list[str]:
        """Names of all tensors, tied ones too."""
        return [*self.tensors, *self.aliases]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files but the manifest and the marker."""
        return sum(entry.size for entry in self.files.values())


@dataclass(frozen=True)
class Marker:
    """The commit marker: which save is committed, and what the bytes of its manifest must be."""

    save_id: str
    manifest_size: int
    manifest_sha256: str
    version: int = VERSION

    @classmethod
    def of(cls, save_id: str, manifest: bytes) -> Marker:
        """The marker of a manifest's bytes."""
        return cls(save_id, len(manifest), hashlib.sha256(manifest).hexdigest())

    def encode(self) -> bytes:
        """As JSON; there is one way to write it, so any other byte is damage."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode() + b"\n"


def parse_marker(data: bytes, where: str) -> Marker:
    """Read a commit marker.

    Args:
        data: The file's bytes.
        where: Its URL, for messages.

    Raises:
        ForeignCheckpointError: It is of another version.
        DamagedCheckpointError: It is not what was written.
    """
    fields = Fields.parse(data, where)
    _check_version(fields, where)
    marker = Marker(fields.text("save_id"), fields.whole("manifest_size"), fields.text("manifest_sha256"))
    if marker.encode() != data or not is_save_id(marker.save_id):
        raise DamagedCheckpointError(f"{where} is not what was written: bytes were changed")
    return marker


def encode(manifest: Manifest) -> bytes:
    """As JSON.

    Raises:
        CheckpointError: The record holds something that JSON does not know, or chunks do not make up their tensors.
    """
    check_coverage(manifest, "manifest")
    body = {
        "format": FORMAT,
        "version": VERSION,
        "save_id": manifest.save_id,
        "created_s": manifest.created_s,
        "record": manifest.record,
        "files": {name: asdict(entry) for name, entry in manifest.files.items()},
        "objects": {name: asdict(place) for name, place in manifest.objects.items()},
        "tensors": {
            **{name: _tensor_to_json(entry) for name, entry in manifest.tensors.items()},
            **{name: {"alias_of": target} for name, target in manifest.aliases.items()},
        },
    }
    try:
        return _in_lines(body).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the record of a checkpoint takes what JSON knows (text, numbers, lists, mappings by text): {error}"
        ) from error


def _in_lines(body: Mapping[str, Any]) -> str:
    """JSON with a line for each file, object and tensor.

    Not ``indent``: with it Python's own encoder is used, which holds the interpreter's lock ten times as long.
    """
    parts = []
    for name, value in body.items():
        text = json.dumps(value, allow_nan=False)
        if name in _TABLES and value:
            entries = (f"  {json.dumps(key)}: {json.dumps(entry, allow_nan=False)}" for key, entry in value.items())
            text = "{\n" + ",\n".join(entries) + "\n }"
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def parse(data: bytes, where: str) -> Manifest:
    """Read a manifest.

    Args:
        data: The file's bytes.
        where: Its URL, for messages.

    Raises:
        ForeignCheckpointError: It is of another format or version.
        DamagedCheckpointError: A field is missing, of another type, or contradicts another.
    """
    fields = Fields.parse(data, where)
    _check_version(fields, where)
    files = {name: _file(name, entry) for name, entry in fields.items("files")}
    tensors: dict[str, TensorEntry] = {}
    aliases: dict[str, str] = {}
    for name, entry in fields.items("tensors"):
        if "alias_of" in entry:
            aliases[name] = entry.text("alias_of")
        else:
            tensors[name] = _tensor(name, entry, files)
    for name, target in aliases.items():
        if target not in tensors:
            raise DamagedCheckpointError(f"{where}: tensors[{name!r}].alias_of is {target!r}, which is not stored")
    manifest = Manifest(
        tensors=tensors,
        aliases=aliases,
        objects={name: _place(entry, files) for name, entry in fields.items("objects")},
        files=files,
        save_id=fields.text("save_id"),
        created_s=fields.number("created_s"),
        record=fields.mapping("record"),
    )
    try:
        check_coverage(manifest, where)
    except CheckpointError as error:
        raise DamagedCheckpointError(str(error)) from error
    return manifest


def check_coverage(manifest: Manifest, where: str) -> None:
    """Each tensor's chunks hold each of its values once.

    Raises:
        CheckpointError: Those of some tensors do not; names them.
    """
    faults = []
    for name, entry in manifest.tensors.items():
        fault = coverage.fault(entry.shape, [coverage.Block(chunk.offsets, chunk.sizes) for chunk in entry.chunks])
        if fault is not None:
            faults.append(f"{name} {list(entry.shape)}: {fault}")
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CheckpointError(f"{where}: tensors are not held once and whole: {'; '.join(faults[:5])}{more}")


def _check_version(fields: Fields, where: str) -> None:
    if fields.text("format") != FORMAT:
        raise ForeignCheckpointError(f"{where}: format is {fields.text('format')!r}, {FORMAT!r} is read")
    version = fields.whole("version")
    if version != VERSION:
        raise ForeignCheckpointError(
            f"{where}: version is {version}, this release reads {VERSION}; read it with the release that wrote it, "
            "and export it: hierdist checkpoint export"
        )


def _tensor_to_json(entry: TensorEntry) -> dict[str, Any]:
    chunks = [{"offsets": chunk.offsets, "sizes": chunk.sizes, **asdict(chunk.place)} for chunk in entry.chunks]
    return {"dtype": entry.dtype, "shape": entry.shape, "chunks": chunks}


def _file(name: str, entry: Fields) -> FileEntry:
    if name in ("", ".", "..", MARKER_FILE) or is_manifest(name) or "/" in name or "\\" in name or "\0" in name:
        raise entry.error("", "is no name of a file of a checkpoint's folder")
    return FileEntry(entry.whole("size"), entry.whole("crc32"), entry.whole("rank"), entry.text("host"))


def _place(entry: Fields, files: Mapping[str, FileEntry]) -> ByteRange:
    place = ByteRange(entry.text("file"), entry.whole("start"), entry.whole("size"), entry.whole("crc32"))
    if place.file not in files:
        raise entry.error("file", f"is {place.file!r}, which files does not list")
    if place.start + place.size > files[place.file].size:
        raise entry.error("size", f"reaches beyond the {files[place.file].size} bytes of {place.file}")
    return place


def _tensor(name: str, entry: Fields, files: Mapping[str, FileEntry]) -> TensorEntry:
    dtype, shape = entry.text("dtype"), entry.wholes("shape")
    if dtype not in ELEMENT_BYTES:
        raise entry.error("dtype", f"is {dtype!r}; known are {', '.join(ELEMENT_BYTES)}")
    chunks = []
    for fields in entry.list("chunks"):
        place = _place(fields, files)
        offsets, sizes = fields.wholes("offsets"), fields.wholes("sizes")
        try:
            piece = Piece(name, dtype, shape, offsets, sizes)
        except CheckpointError as error:
            raise fields.error("offsets", str(error)) from error
        if piece.size_bytes != place.size:
            raise fields.error("size", f"is {place.size}; {piece} takes {piece.size_bytes} bytes")
        chunks.append(Chunk(offsets, sizes, place))
    return TensorEntry(dtype, shape, tuple(chunks))
