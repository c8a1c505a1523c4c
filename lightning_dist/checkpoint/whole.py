"""A sharded checkpoint outside of a run, on one process: single tensors, and exports in bounded memory.

Exports are written block by block, from the first byte to the last, and memory holds one block; see ``blocks``.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_dist.checkpoint.archive import LaterTensor, write_archive
from lightning_dist.checkpoint.blocks import read_blocks
from lightning_dist.checkpoint.catalog import Checkpoint
from lightning_dist.checkpoint.export import TIED_KEY, Exported
from lightning_dist.checkpoint.host_pieces import Held, HostPiece
from lightning_dist.checkpoint.load_planner import FillPlanner
from lightning_dist.checkpoint.pieces import ELEMENT_BYTES, Piece
from lightning_dist.checkpoint.shard_reader import ShardReader
from lightning_dist.errors import CheckpointError

# As safetensors names them; https://github.com/huggingface/safetensors#format
_SAFETENSORS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "complex64": "C64",
}  # fmt: skip


def read_tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """A tensor, whole; checksums are compared."""
    entry = checkpoint.manifest.tensor(name)
    tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    _fill({name: tensor}, checkpoint)
    return tensor


def read_all(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, Any]:
    """Tensors, whole, and objects, by name; checksums are compared. No other process takes part."""
    manifest = checkpoint.manifest
    state: dict[str, Any] = {}
    for name in names:
        if name in manifest.objects:
            state[name] = None
        else:
            entry = manifest.tensor(name)
            state[name] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    _fill(state, checkpoint)
    return state


def read_later(checkpoint: Checkpoint, names: Collection[str]) -> dict[str, Any]:
    """As :func:`read_all`, but tensors are read once they are written to a file."""
    manifest = checkpoint.manifest
    state: dict[str, Any] = {name: None for name in names if name in manifest.objects}
    _fill(state, checkpoint)
    return {name: state[name] if name in state else _later(checkpoint, name) for name in names}


def export_sharded_safetensors(checkpoint: Checkpoint, output: Path, *, prefix: str = "") -> Exported:
    """Write a sharded checkpoint's tensors as a safetensors file; tied ones once, named in the metadata.

    Args:
        checkpoint: A committed checkpoint.
        output: Written at once or not at all; replaced if it is there.
        prefix: Only names that begin so are written, without it.

    Raises:
        CheckpointError: There are no such tensors, one is of a type that safetensors lacks, or bytes are damaged.
    """
    names, tied = _chosen(checkpoint, prefix)
    with replaced(output) as partial:
        _write_safetensors(checkpoint, names, tied, partial, prefix)
    return _exported(checkpoint, names, tied, prefix)


def export_sharded_torch(checkpoint: Checkpoint, output: Path, *, prefix: str = "") -> Exported:
    """Write a sharded checkpoint's tensors as ``torch.save`` writes ``{"state_dict": {...}}``, tied ones tied.

    Args:
        checkpoint: A committed checkpoint.
        output: Written at once or not at all; replaced if it is there.
        prefix: Only names that begin so are written, without it.
    """
    names, tied = _chosen(checkpoint, prefix)
    state: dict[str, Any] = {name.removeprefix(prefix): _later(checkpoint, name) for name in names}
    state.update({name: state[target] for name, target in tied.items()})
    with replaced(output) as partial:
        write_archive({"state_dict": state}, partial)
    return _exported(checkpoint, names, tied, prefix)


@contextmanager
def replaced(output: Path) -> Iterator[Path]:
    """A file beside ``output`` that takes its place at the end, or goes."""
    partial = output.with_name(f".{output.name}.partial")
    try:
        yield partial
        os.replace(partial, output)
    except OSError as error:
        raise CheckpointError(f"{output} cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _exported(checkpoint: Checkpoint, names: Sequence[str], tied: dict[str, str], prefix: str) -> Exported:
    size_bytes = sum(checkpoint.manifest.tensor(name).size_bytes for name in names)
    return Exported(tuple(name.removeprefix(prefix) for name in names), tied, size_bytes)


def _later(checkpoint: Checkpoint, name: str) -> LaterTensor:
    entry = checkpoint.manifest.tensor(name)
    return LaterTensor(entry.dtype, entry.shape, functools.partial(read_blocks, checkpoint, name))


def _chosen(checkpoint: Checkpoint, prefix: str) -> tuple[list[str], dict[str, str]]:
    """Names that are written, and (without the prefix) those tied to them -> the name they are tied to.

    A tensor is written under its first name that has the prefix, which need not be the one it is stored under.
    """
    manifest = checkpoint.manifest
    first: dict[str, str] = {}
    tied: dict[str, str] = {}
    for name in manifest.tensor_names:
        if not name.startswith(prefix):
            continue
        stored = manifest.aliases.get(name, name)
        if first.setdefault(stored, name) != name:
            tied[name.removeprefix(prefix)] = first[stored].removeprefix(prefix)
    if not first:
        names = ", ".join(manifest.tensor_names[:4])
        raise CheckpointError(
            f"{checkpoint.folder.url} has no tensors whose names begin with {prefix!r}; they are {names}"
        )
    return list(first.values()), tied


def _write_safetensors(
    checkpoint: Checkpoint, names: list[str], tied: Mapping[str, str], path: Path, prefix: str
) -> None:
    manifest = checkpoint.manifest
    unknown = [name for name in names if manifest.tensor(name).dtype not in _SAFETENSORS]
    if unknown:
        raise CheckpointError(f"{unknown[0]} is of type {manifest.tensor(unknown[0]).dtype}, which safetensors lacks")
    # Wide types first, so that each tensor begins at a multiple of its width.
    ordered = sorted(names, key=lambda name: -ELEMENT_BYTES[manifest.tensor(name).dtype])
    header: dict[str, object] = {"__metadata__": {"format": "pt", TIED_KEY: json.dumps(tied)}}
    end = 0
    for name in ordered:
        entry = manifest.tensor(name)
        span = [end, end + entry.size_bytes]
        header[name.removeprefix(prefix)] = {
            "dtype": _SAFETENSORS[entry.dtype], "shape": list(entry.shape), "data_offsets": span,
        }  # fmt: skip
        end += entry.size_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            file.writelines(read_blocks(checkpoint, name))
        file.flush()
        os.fsync(file.fileno())


def _fill(state: dict[str, Any], checkpoint: Checkpoint) -> None:
    """Read into tensors, and put objects where there is none, without a process group."""
    manifest = checkpoint.manifest
    targets: dict[str, Any] = dict.fromkeys(state)
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor):
            piece = Piece.whole(name, manifest.tensor(name).dtype, tensor.shape)
            targets[name] = Held((HostPiece(piece, tensor),))
    planner, reader = FillPlanner(), ShardReader(checkpoint.folder, manifest=manifest, threads=1)
    metadata = reader.read_metadata()
    planner.set_up_planner(targets, metadata)
    reader.read_data(planner.create_local_plan(), planner).wait()
    state.update({name: targets[name] for name, value in state.items() if not isinstance(value, torch.Tensor)})
