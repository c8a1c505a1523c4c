"""What is in a folder or URL of checkpoints: which are whole, which are not and why, which is the newest.

Asked for by name, a checkpoint that is not whole is an error, :func:`open_checkpoint`. Where one of many is wanted,
:func:`newest`, it is skipped with a warning that names the file and the reason.
"""

from __future__ import annotations

import hashlib
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_dist.checkpoint.manifest import (
    MARKER_FILE,
    FileEntry,
    Manifest,
    parse,
    parse_marker,
)
from lightning_dist.checkpoint.save_ids import manifest_file, save_id_of
from lightning_dist.checkpoint.storage import Folder
from lightning_dist.errors import CheckpointError, DamagedCheckpointError, UncommittedCheckpointError

_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint.

    Attributes:
        folder: Where it is.
        manifest: What it holds.
    """

    folder: Folder
    manifest: Manifest

    @property
    def age_key(self) -> tuple[float, float]:
        """The larger, the newer: by the time of commit, then by step."""
        step = self.manifest.record.get("step")
        return self.manifest.created_s, float(step) if isinstance(step, (int, float)) else -1.0


@dataclass(frozen=True)
class Found:
    """A folder that holds a checkpoint or what is left of one.

    Attributes:
        name: Of the folder.
        folder: The folder.
        checkpoint: If its marker and manifest can be read.
        problem: Why it cannot be used; ``None`` if it can.
    """

    name: str
    folder: Folder
    checkpoint: Checkpoint | None
    problem: CheckpointError | None


def open_checkpoint(folder: Folder, *, full: bool = False) -> Checkpoint:
    """A checkpoint that is committed and verified.

    Args:
        folder: Of the checkpoint.
        full: Read all bytes and compare checksums; otherwise marker, manifest and sizes of files are compared.

    Raises:
        UncommittedCheckpointError: There is none, or it has no marker.
        DamagedCheckpointError: What is there is not what was written; names the file.
        ForeignCheckpointError: It is of another version.
    """
    checkpoint = Checkpoint(folder, read_manifest(folder))
    check_sizes(checkpoint)
    if full:
        for name, entry in checkpoint.manifest.files.items():
            _check_bytes(checkpoint, name, entry)
    return checkpoint


def holds_checkpoint(folder: Folder) -> bool:
    """Whether there is a checkpoint, or what is left of one."""
    return any(name == MARKER_FILE or save_id_of(name) is not None for name in folder.list())


def read_manifest(folder: Folder) -> Manifest:
    """The manifest of a committed checkpoint, compared with its marker; files are not looked at.

    Raises:
        CheckpointError: As :func:`open_checkpoint`.
    """
    return parse_manifest(folder, read_manifest_file(folder))


def read_manifest_file(folder: Folder) -> bytes:
    """The bytes of :func:`read_manifest`, for :func:`parse_manifest`."""
    marker_data = folder.read(MARKER_FILE)
    if marker_data is None:
        if not holds_checkpoint(folder):
            raise UncommittedCheckpointError(f"{folder.url} holds no sharded checkpoint: it has no {MARKER_FILE}")
        raise UncommittedCheckpointError(
            f"{folder.url} has no {MARKER_FILE}: its save was cut off, or it is being written"
        )
    marker = parse_marker(marker_data, _join(folder, MARKER_FILE))
    name = manifest_file(marker.save_id)
    where, data = _join(folder, name), folder.read(name)
    if data is None:
        raise DamagedCheckpointError(f"{where} is missing")
    if len(data) != marker.manifest_size:
        raise DamagedCheckpointError(f"{where} has {len(data)} bytes, {marker.manifest_size} were written")
    if hashlib.sha256(data).hexdigest() != marker.manifest_sha256:
        raise DamagedCheckpointError(f"{where} is not what was written: its sha256 is another")
    return data


def parse_manifest(folder: Folder, data: bytes) -> Manifest:
    """The manifest of a folder from its bytes."""
    return parse(data, f"the manifest of {folder.url}")


def check_sizes(checkpoint: Checkpoint) -> None:
    """Compare the sizes of files with the manifest.

    Raises:
        DamagedCheckpointError: A file is missing or of another size; names it.
    """
    there = checkpoint.folder.list()
    for name, entry in checkpoint.manifest.files.items():
        where = _join(checkpoint.folder, name)
        if there.get(name) is None:
            raise DamagedCheckpointError(f"{where} is missing; rank {entry.rank} ({entry.host}) wrote it")
        if there[name] != entry.size:
            raise DamagedCheckpointError(f"{where} has {there[name]} bytes, {entry.size} were written")


def survey(root: Folder, *, full: bool = False) -> list[Found]:
    """All checkpoints in a folder of them, the newest first, then what is not committed.

    Args:
        root: Folder of folders; others in it are left out.
        full: As for :func:`open_checkpoint`.
    """
    found = list(_look(root, full=full))
    whole = [entry for entry in found if entry.checkpoint is not None]
    whole.sort(key=lambda entry: (entry.checkpoint.age_key, entry.name) if entry.checkpoint else (), reverse=True)
    return whole + [entry for entry in found if entry.checkpoint is None]


def newest(root: Folder, *, full: bool = False) -> Checkpoint | None:
    """The newest checkpoint that is committed and verified; ``None`` if there is none.

    Args:
        root: Folder of folders.
        full: As for :func:`open_checkpoint`; only as many are read as need be.

    Warns:
        UserWarning: For each that is newer or not whole and was skipped.
    """
    best: Checkpoint | None = None
    for entry in survey(root):
        problem = entry.problem
        if problem is None and best is None and entry.checkpoint is not None:
            try:
                best = open_checkpoint(entry.folder, full=True) if full else entry.checkpoint
            except CheckpointError as error:
                problem = error
        if problem is not None:
            warnings.warn(f"a checkpoint is skipped: {problem}", stacklevel=2)
    return best


def clear(folder: Folder) -> None:
    """Remove a checkpoint's files, the marker first: cut off anywhere, what is left is not committed."""
    names = folder.list()
    if MARKER_FILE in names:
        folder.remove(MARKER_FILE)
    for name in names:
        if save_id_of(name) is not None or name.startswith(f"{MARKER_FILE}."):  # a marker that was not finished
            folder.remove(name)


def clear_older(folder: Folder, than: str, *, but: str | None = None) -> None:
    """Remove the files of saves that began before another one.

    Args:
        folder: Of the checkpoint.
        than: Id of the other one.
        but: Id of one whose files stay.
    """
    for name in folder.list():
        found = save_id_of(name)
        if found is not None and found < than and found != but:
            folder.remove(name)


def committed_save(folder: Folder) -> str | None:
    """Id of the save that is committed; ``None`` if none is."""
    data = folder.read(MARKER_FILE)
    try:
        return None if data is None else parse_marker(data, _join(folder, MARKER_FILE)).save_id
    except CheckpointError:
        return None


def delete(root: Folder, name: str) -> None:
    """Remove a checkpoint and, if nothing else is in it, its folder."""
    folder = root.child(name)
    clear(folder)
    if not folder.list():
        root.remove(name)


def _look(root: Folder, *, full: bool) -> Iterator[Found]:
    for name, size in sorted(root.list().items()):
        if size is not None:
            continue
        folder = root.child(name)
        if not holds_checkpoint(folder):
            continue
        manifest_read: Checkpoint | None = None
        problem: CheckpointError | None = None
        try:
            manifest_read = Checkpoint(folder, read_manifest(folder))
            open_checkpoint(folder, full=True) if full else check_sizes(manifest_read)
        except CheckpointError as error:
            problem = error
        yield Found(name, folder, manifest_read, problem)


def _check_bytes(checkpoint: Checkpoint, name: str, entry: FileEntry) -> None:
    scratch = memoryview(bytearray(min(_BLOCK_BYTES, entry.size)))
    crc = 0
    for start in range(0, entry.size, _BLOCK_BYTES):
        block = scratch[: min(_BLOCK_BYTES, entry.size - start)]
        checkpoint.folder.read_into(name, start, block)
        crc = zlib.crc32(block, crc)
    if crc != entry.crc32:
        raise DamagedCheckpointError(
            f"{_join(checkpoint.folder, name)} is not what was written: crc32 is {crc:08x}, not {entry.crc32:08x}"
        )


def _join(folder: Folder, name: str) -> str:
    return f"{folder.url.rstrip('/')}/{name}"
