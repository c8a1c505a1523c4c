"""Weights for the world outside: a checkpoint's tensors as a safetensors file, under their names.

Checkpoints of any ``parallel=`` hold whole tensors, so this needs one process and no GPU. Safetensors holds no tensor
twice: tensors tied to each other are written once, under the first of their names, and the others are listed in the
file's metadata, from which :func:`load_safetensors` ties them again.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lightning_dist.errors import CheckpointError

#: In a safetensors file's metadata: JSON of name -> name of the tensor in the file that it is.
TIED_KEY = "hierdist_tied"


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        names: Of the tensors in the file.
        tied: Name -> name of the tensor in the file that it is.
        size_bytes: Of the tensors.
    """

    names: tuple[str, ...]
    tied: dict[str, str]
    size_bytes: int


def export_safetensors(checkpoint: Path, output: Path, *, prefix: str = "") -> Exported:
    """Write the ``state_dict`` of a Lightning checkpoint; nothing is run that the file may contain.

    Args:
        checkpoint: A ``.ckpt`` file.
        output: Written at once or not at all; replaced if it is there.
        prefix: Only names that begin so are written, without it.

    Raises:
        CheckpointError: The file is no checkpoint, or has no tensors of such names.
    """
    state = _state_dict_of(checkpoint)
    tensors = {
        name.removeprefix(prefix): value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name.startswith(prefix)
    }
    if not tensors:
        raise CheckpointError(
            f"{checkpoint} has no tensors whose names begin with {prefix!r}; they are {', '.join(list(state)[:4])}, ..."
        )
    kept, tied = _without_ties(tensors)
    partial = output.with_name(f".{output.name}.partial")
    try:
        save_file(kept, partial, metadata={"format": "pt", TIED_KEY: json.dumps(tied)})
        os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)
    return Exported(tuple(kept), tied, sum(t.numel() * t.element_size() for t in kept.values()))


def load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The state that :func:`export_safetensors` has written, tied tensors being one again; of other files, all tensors.

    Raises:
        CheckpointError: It is no safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
            tied = json.loads((file.metadata() or {}).get(TIED_KEY, "{}"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error
    return {**state, **{name: state[first] for name, first in tied.items()}}


def _state_dict_of(checkpoint: Path) -> Mapping[str, object]:
    try:
        loaded = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{checkpoint} holds objects besides tensors and plain values (hyper-parameters of a class of their own?), "
            "which are not run here. Save one without: trainer.save_checkpoint(path, weights_only=True), or a callback "
            f"ModelCheckpoint(save_weights_only=True). torch said: {str(error).splitlines()[0]}"
        ) from error
    except (OSError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{checkpoint} cannot be read as a checkpoint: {error}") from error
    state = loaded.get("state_dict") if isinstance(loaded, Mapping) else None
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{checkpoint} has no state_dict: it is not a Lightning checkpoint")
    return state


def _without_ties(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Each tensor once, with memory of its own, and the names left out -> the name kept."""
    first: dict[tuple[object, ...], str] = {}
    kept: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        place = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        if tensor.numel() and place in first:
            tied[name] = first[place]
            continue
        first[place] = name
        kept[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return kept, tied
