"""A sharded checkpoint as Lightning's own files hold it, whole; by one process, outside of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_dist.checkpoint import catalog, leases, whole
from lightning_dist.checkpoint.archive import write_archive
from lightning_dist.checkpoint.export import Exported
from lightning_dist.checkpoint.manifest import Manifest
from lightning_dist.checkpoint.storage import open_folder
from lightning_dist.errors import CheckpointError
from lightning_dist.modes.checkpoints import MODEL, OPTIMIZER, RANK, REST, optimizers_of, tied

_FOR_RESUMING = ("optimizer_states", "lr_schedulers", "callbacks")


def load_whole(path: str, *, weights_only: bool = False) -> dict[str, Any]:
    """Lightning's dictionary of a sharded checkpoint, all of it, as its own files hold it; no other process takes part.

    Args:
        path: Folder or URL.
        weights_only: Leave out the states of optimizers.
    """
    opened = catalog.open_checkpoint(open_folder(path))
    indices = [] if weights_only else optimizers_of(opened.manifest)
    with leases.leased(opened.folder):
        state = whole.read_all(opened, _names_of(opened.manifest, indices))
    return _dictionary_of(opened.manifest, state, indices)


def export(opened: catalog.Checkpoint, output: Path, *, weights_only: bool = False) -> Exported:
    """Write Lightning's file of a sharded checkpoint, block by block; no other process takes part.

    Args:
        opened: A committed checkpoint.
        output: Written at once or not at all; replaced if it is there.
        weights_only: As ``save_weights_only`` of Lightning's callback: without what only resuming needs.

    Raises:
        CheckpointError: It was not saved by a Trainer, or bytes are damaged.
    """
    manifest = opened.manifest
    if REST not in manifest.objects:
        raise CheckpointError(
            f"{opened.folder.url} was not saved by a Trainer; of its tensors, {', '.join(manifest.tensor_names[:4])}, "
            "those whose names begin alike can be written: --prefix ..."
        )
    indices = [] if weights_only else optimizers_of(manifest)
    names = _names_of(manifest, indices)
    checkpoint = _dictionary_of(manifest, whole.read_later(opened, names), indices)
    if weights_only:
        for key in _FOR_RESUMING:
            checkpoint.pop(key, None)
    with whole.replaced(output) as partial:
        write_archive(checkpoint, partial)
    stored = [name for name in names if name in manifest.tensors]
    aliases = {name: target for name, target in manifest.aliases.items() if name.startswith(MODEL)}
    return Exported(tuple(stored), aliases, sum(manifest.tensors[name].size_bytes for name in stored))


def _names_of(manifest: Manifest, indices: Iterable[int]) -> list[str]:
    names = [REST, *(name for name in manifest.tensor_names if name.startswith(MODEL))]
    for index in indices:
        prefix = f"{OPTIMIZER}{index}/"
        names += [name for name in (*manifest.tensors, *manifest.objects) if name.startswith(prefix)]
    return names


def _dictionary_of(manifest: Manifest, state: Mapping[str, Any], indices: list[int]) -> dict[str, Any]:
    checkpoint: dict[str, Any] = state[REST]["checkpoint"]
    weights = {name.removeprefix(MODEL): value for name, value in state.items() if name.startswith(MODEL)}
    checkpoint["state_dict"] = {**tied(manifest, weights), **state[REST]["state_dict"]}
    if indices:
        checkpoint["optimizer_states"] = [_whole_optimizer(f"{OPTIMIZER}{index}/", state) for index in indices]
    return checkpoint


def _whole_optimizer(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    said = [own.pop(name) for name in list(own) if name.startswith(RANK)]
    groups, number_of = [], dict[str, int]()
    for group in said[0]["groups"]:
        for name in group["params"]:
            number_of[name] = len(number_of)
        groups.append({**group, "params": [number_of[name] for name in group["params"]]})
    entries: dict[int, dict[str, Any]] = {}
    for values in (each["values"] for each in said):
        for name, found in values.items():
            entries.setdefault(number_of[name], {}).update(found)
    for name, value in own.items():
        parameter, _, entry = name.rpartition(".")
        entries.setdefault(number_of[parameter], {})[entry] = value
    return {"state": entries, "param_groups": groups}
