"""Lightning's checkpoints as sharded ones: its dictionary is taken apart when it is saved, and put together again.

What a sharded checkpoint holds, by name:

- ``model/<name>``: tensors of ``state_dict()``;
- ``optimizer/<i>/<parameter>.<entry>``: tensors of an optimizer's state;
- ``optimizer/<i>/rank/<r>``: its other values, and how its parameters are grouped;
- ``lightning``: all else of the dictionary, as rank 0 has it;
- ``rank/<r>``: a rank's random state, and where its data loaders are;
- ``feedback/<r>`` and ``feedback/<r>/values``: what a rank's codec has lost of gradients, and is to be sent still.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor

from lightning_dist import build
from lightning_dist.checkpoint import catalog, leases, sharded
from lightning_dist.checkpoint.host_pieces import Held
from lightning_dist.checkpoint.lineage import RUN
from lightning_dist.checkpoint.local_disk import PARTIAL
from lightning_dist.checkpoint.manifest import MARKER_FILE, TWIN, Manifest
from lightning_dist.checkpoint.objects import Encoded, encode
from lightning_dist.checkpoint.storage import Folder, open_folder
from lightning_dist.comm.host_relay import HostRelay
from lightning_dist.config import CheckpointConfig
from lightning_dist.elastic.launched import launched
from lightning_dist.errors import CheckpointError, CombinationError, StateMismatchError
from lightning_dist.modes import random_states
from lightning_dist.modes.kept_feedback import FEEDBACK, WINDOW, kept_feedback, load_feedback
from lightning_dist.modes.local_state import OwnState
from lightning_dist.modes.mode import Mode
from lightning_dist.parallel.held_state import HeldState, Stored, TensorToFill, whole_to_fill
from lightning_dist.parallel.tensor import keep_list_options

MODEL, OPTIMIZER, REST, RANK = "model/", "optimizer/", "lightning", "rank/"
_LOADERS = ("loops", "fit_loop", "state_dict", "combined_loader")
OPENED = "hierdist_opened"
"""Key of a loaded dictionary under which the rest is still to be read."""


@dataclass(frozen=True)
class Opened:
    """A checkpoint that is being loaded.

    Attributes:
        folder: Where it is.
        manifest: What it holds.
        set_random_state: Makes that of this process what it is to be.
        stored_at: Path or URL in storage, if it is read from memory.
    """

    folder: Folder
    manifest: Manifest
    set_random_state: Callable[[], None]
    stored_at: str | None = None


def refuse(trainer: pl.Trainer, mode: Mode, config: CheckpointConfig) -> None:
    """What sharded checkpoints cannot hold, or not copy while it changes.

    Raises:
        CombinationError: The run has some of it.
    """
    averaging = [type(each).__name__ for each in trainer.callbacks if isinstance(each, WeightAveraging)]  # type: ignore[attr-defined]
    changing = [type(each).__name__ for each in trainer.callbacks if isinstance(each, StochasticWeightAveraging)]  # type: ignore[attr-defined]
    if changing and config.snapshot == "overlapped":
        raise CombinationError(
            f"{changing[0]} changes weights between steps, and with checkpoint.snapshot=overlapped only steps may: "
            "write checkpoint.snapshot=at_once"
        )
    name = mode.setting.parallel.mode
    if averaging and name != "ddp":
        raise CombinationError(
            f"{averaging[0]} puts a second model into checkpoints, which is spread over ranks with parallel={name}: "
            "write checkpoint=full, or parallel=ddp"
        )


def save(
    saver: build.CheckpointSaver,
    checkpoint: dict[str, Any],
    path: str,
    *,
    mode: Mode,
    optimizers: list[torch.optim.Optimizer],
    storage_options: Mapping[str, Any] | None = None,
    at_once: bool = False,
    named: str | None = None,
    in_memory: bool = False,
) -> build.SaveStarted:
    """Begin to write a checkpoint; every rank calls it.

    Args:
        saver: The run's.
        checkpoint: As Lightning made it, with states as this rank holds them (:meth:`Mode.as_held`).
        path: Folder or URL.
        mode: The present one.
        optimizers: All of the fit; the checkpoint may have their states.
        storage_options: For fsspec.
        at_once: Write it to its end.
        named: The path that it will have, if that is another.
        in_memory: Nothing is written to the path: its folder says whose the checkpoint is, and its name what it is.
    """
    start_ns = mode.setting.run.events.clock_ns()
    rest = dict(checkpoint)
    is_for_resuming = "optimizer_states" in rest  # not with save_weights_only
    model, states = rest.pop("state_dict", {}), rest.pop("optimizer_states", ())
    local = mode.local_state
    if local is not None and local.is_apart:
        tensors = local.held(saver.held, mode.held_state, model, optimizers, states, _prefix_of)
    else:
        tensors = saver.held.of(mode.held_state, model, optimizers, states, prefixes=_prefix_of)
    others = {name: value for name, value in model.items() if not isinstance(value, Tensor)}
    rank = mode.setting.run.rank
    objects: dict[str, Encoded] = {}
    # Often, and alike each time: what it refers to is looked at where it has something new.
    known = saver.known if in_memory else None
    made = functools.partial(encode, reads_back=not in_memory or saver.kept_step is None, known=known)
    for index, state in enumerate(states):
        name = f"{_prefix_of(index)}{RANK}{rank}"
        objects[name] = made(_values_of(saver.held.names_of(index), state), name)
    name = f"{RANK}{rank}"
    objects[name] = made({"random": random_states.collect(), "loaders": _loaders_of(rest)}, name)
    feedback = mode.feedback if is_for_resuming else None
    if feedback is not None:
        kept, owed = kept_feedback(feedback, rank)
        objects[f"{FEEDBACK}{rank}"] = made(kept, f"{FEEDBACK}{rank}")
        tensors = [*tensors, *owed] if owed else tensors
    if rank == 0:
        objects[REST] = made({"checkpoint": rest, "state_dict": others}, REST)
    record = {
        "step": rest.get("global_step"),
        "epoch": rest.get("epoch"),
        RUN: launched(os.environ).run,
        "world_size": mode.setting.run.cluster.world_size,
        "hosts": list(mode.setting.run.cluster.host_of_rank),
        "parallel": mode.setting.parallel.mode,
        "options": mode.setting.options,
        **({} if local is None or not is_for_resuming else local.record()),
        WINDOW: None if feedback is None else feedback.window,
        "torch": torch.__version__,
        "lightning": rest.get("pytorch-lightning_version"),
    }
    return saver.save(
        None if in_memory else open_folder(path, storage_options=storage_options),
        tensors,
        objects,
        record,
        optimizers=optimizers,
        kept_as=(named or path) if is_for_resuming else None,
        since_ns=start_ns,
        at_once=at_once,
    )


def save_at_once(
    save: Callable[..., build.SaveStarted], saver: build.CheckpointSaver, path: str, *, moves: bool
) -> None:
    """Write a checkpoint whole; on a disk its folder is not there before. Every rank calls it.

    Lightning takes the folder of the highest number for what a preempted run has left, whole or not.

    Args:
        save: :func:`save` but for the path and ``at_once``.
        saver: The run's.
        path: The same on all ranks.
        moves: Whether this rank gives the folder its name.
    """
    if "://" in path:
        save(path=path, at_once=True)
        return
    folder, name = os.path.split(path)
    aside = os.path.join(folder, f".{name.replace('hpc_ckpt_', 'hpc-')}.unfinished")
    save(path=aside, at_once=True, named=path)
    if moves and not saver.has_failed:
        if is_sharded(path):
            remove(path)
        os.replace(aside, path)


def remove(path: str) -> None:
    """Remove a sharded checkpoint, its marker first; not, and there is a warning, while somebody reads it."""
    parent, _, name = path.rstrip("/").rpartition("/")
    root = open_folder(parent or ".")
    if read_by := leases.readers(root.child(name)):
        warnings.warn(
            f"{path} stays, since it is being read by {', '.join(read_by)}; hierdist checkpoint prune removes it later",
            stacklevel=2,
        )
        return
    leases.forget(root.child(name))
    catalog.delete(root, name)


def log_saved(trainer: pl.Trainer, saver: build.CheckpointSaver, logged: build.Saved | None) -> build.Saved | None:
    """Give the Trainer's loggers what the newest committed checkpoint took, on rank 0.

    Args:
        trainer: Whose loggers.
        saver: The run's.
        logged: What they were given last; not again.

    Returns:
        What they have been given by now.
    """
    saved = saver.last_saved if trainer.is_global_zero else None
    if saved is None or saved is logged:
        return logged
    step = trainer.fit_loop.epoch_loop._batches_that_stepped  # what Lightning logs under
    for logger in trainer.loggers:
        logger.log_metrics(_metrics_of(saved, saver.skipped), step=step)
    return saved


def _metrics_of(saved: build.Saved, skipped: int) -> dict[str, float]:
    metrics: dict[str, float] = {
        "checkpoint/stall_s": saved.stall_s,
        "checkpoint/background_s": saved.background_s,
        "checkpoint/rank_bytes": saved.rank_bytes,
        "checkpoint/skipped": skipped,
    }
    if saved.total_bytes is not None:
        metrics["checkpoint/total_bytes"] = saved.total_bytes
        metrics["checkpoint/bytes_per_s"] = saved.total_bytes / max(saved.background_s, 1e-9)
    return metrics


def marker_of(path: str) -> str | None:
    """The file that says when a sharded checkpoint was committed; ``None`` if it was not."""
    is_committed = catalog.committed_save(open_folder(path)) is not None
    return f"{path.rstrip('/')}/{MARKER_FILE}" if is_committed else None


def without_marker(path: str) -> str:
    """A checkpoint's path, which may be given as that of its marker."""
    return path.removesuffix(f"/{MARKER_FILE}")


def is_sharded(path: str) -> bool:
    """Whether there is a sharded checkpoint at a path or URL, whole or not; web pages hold files only."""
    return not path.startswith(("http://", "https://")) and catalog.holds_checkpoint(open_folder(path))


def is_unwritten(folder: str) -> bool:
    """Whether a folder has no whole file: a save has just begun there, or was cut off as it did."""
    return all(name.endswith(PARTIAL) for name in open_folder(folder).list())


def load(
    opened: catalog.Checkpoint,
    held: HeldState | None,
    rank: int,
    world_size: int,
    *,
    stored_at: str | None = None,
    relay: HostRelay | None = None,
) -> dict[str, Any]:
    """Lightning's dictionary of a sharded checkpoint; every rank calls it.

    The states of optimizers are read later, by :func:`load_optimizers`.

    Args:
        opened: The checkpoint, in storage or in memory; the same on all ranks.
        held: Of the module, once it is as it will be trained; ``None`` before: then weights are whole.
        rank: This process's global rank.
        world_size: Number of ranks.
        stored_at: Where else it is, in storage, if it is read from memory.
        relay: The ranks of this host, if they are to read once what several need.
    """
    folder, manifest = opened.folder, opened.manifest
    saved_by = int(manifest.record.get("world_size") or world_size)
    successor = random_states.Successor.of(rank, saved_by)
    own, other = f"{RANK}{successor.rank}", f"{RANK}{successor.other}"
    state: dict[str, Any] = dict.fromkeys(name for name in (REST, own, other) if name in manifest.objects)
    weights = _stored(manifest, MODEL)
    if held is not None:
        to_fill = list(held.model_to_fill(weights))
    else:
        to_fill = [whole_to_fill(name, stored) for name, stored in weights.items()]
    state.update(_targets(MODEL, to_fill))
    with _leased(folder, rank, stored_at):
        sharded.load(state, folder, manifest=manifest, relay=relay)
    checkpoint: dict[str, Any] = state[REST]["checkpoint"]
    filled = {each.name: each.value() for each in to_fill}
    checkpoint["state_dict"] = {**tied(manifest, filled), **state[REST]["state_dict"]}
    mine = state.get(own)
    if mine is not None and saved_by == world_size:
        _put_loaders(checkpoint, mine["loaders"])
    if indices := optimizers_of(manifest):
        checkpoint["optimizer_states"] = [{} for _ in indices]
    checkpoint[OPENED] = Opened(folder, manifest, _setter(mine, state.get(other), successor.turn), stored_at)
    return checkpoint


def _setter(mine: Mapping[str, Any] | None, other: Mapping[str, Any] | None, turn: int) -> Callable[[], None]:
    if mine is None:
        return lambda: None
    known = None if other is None else other["random"]
    return functools.partial(random_states.restore, mine["random"], known, turn=turn)


def _leased(folder: Folder, rank: int, stored_at: str | None) -> AbstractContextManager[None]:
    """Inside, nobody who looks removes a checkpoint in storage; one rank says so for all."""
    return leases.leased(folder) if rank == 0 and stored_at is None else nullcontext()


def load_optimizers(
    opened: Opened,
    mode: Mode,
    optimizers: list[torch.optim.Optimizer],
    rank: int,
    *,
    relay: HostRelay | None = None,
) -> None:
    """Read the states of optimizers and error feedback, and set this rank's random state; every rank calls it.

    Args:
        opened: As :func:`load` left it.
        mode: The present one.
        optimizers: Whose states are read.
        rank: This process's global rank.
        relay: As for :func:`load`.

    Raises:
        StateMismatchError: The checkpoint has other optimizers, or their parameters are grouped in another way.
    """
    held = mode.held_state()
    local = mode.local_state
    own = local.own_of(opened.manifest) if local is not None else OwnState("", None)
    try:
        _load_optimizers(opened, held, optimizers, rank, own, relay)
    except CheckpointError as error:  # the same on all ranks
        stored = None if isinstance(error, StateMismatchError) else _in_storage(opened, relay)
        if stored is None:
            raise
        warnings.warn(f"{opened.stored_at} is read from storage: {error}", stacklevel=2)
        opened = stored
        _load_optimizers(opened, held, optimizers, rank, own, relay)
    names = {name for optimizer in optimizers for name in held.names_held(optimizer)}
    load_feedback(opened.folder, opened.manifest, mode, names)
    if local is not None and local.load(opened.folder, opened.manifest, held, MODEL):
        mode.has_taken()


def _in_storage(opened: Opened, relay: HostRelay | None) -> Opened | None:
    """The same save in storage; ``None`` if it was read from there, or another is there by now."""
    if opened.stored_at is None:
        return None
    try:
        found = sharded.open_checkpoint(open_folder(opened.stored_at), relay=relay)
    except CheckpointError:  # it was written to memory only
        return None
    twins = [each.record.get(TWIN) for each in (found.manifest, opened.manifest)]
    if found.manifest.save_id != opened.manifest.save_id and (twins[0] is None or twins[0] != twins[1]):
        return None
    return replace(opened, folder=found.folder, manifest=found.manifest, stored_at=None)


def _load_optimizers(
    opened: Opened,
    held: HeldState,
    optimizers: list[torch.optim.Optimizer],
    rank: int,
    own: OwnState,
    relay: HostRelay | None,
) -> None:
    manifest = opened.manifest
    if own.root:  # ranks of a host may read what others do not
        relay = None
    for index, optimizer in enumerate(optimizers):
        prefix = f"{OPTIMIZER}{index}/"
        names = [name for name in manifest.objects if name.startswith(prefix + RANK)]
        if own.ranks is not None:
            names = [f"{prefix}{RANK}{each}" for each in own.ranks if f"{prefix}{RANK}{each}" in names] or names
        if not names:
            raise StateMismatchError(
                f"{opened.folder.url} has no state of optimizer {index}; {len(optimizers)} are to be loaded"
            )
        stored = own.root + prefix
        to_fill = list(held.optimizer_to_fill(optimizer, _stored(manifest, stored)))
        state: dict[str, Any] = {**dict.fromkeys(names), **_targets(stored, to_fill)}
        with _leased(opened.folder, rank, opened.stored_at):
            sharded.load(state, opened.folder, manifest=manifest, relay=relay)
        number_of = held.names_held(optimizer)
        entries: dict[int, dict[str, Any]] = {}
        for name in names:
            for parameter, values in state[name]["values"].items():
                if parameter in number_of:
                    entries.setdefault(number_of[parameter], {}).update(values)
        for each in to_fill:
            parameter, _, entry = each.name.rpartition(".")
            entries.setdefault(number_of[parameter], {})[entry] = each.value()
        ordered = list(held.names_of(optimizer))
        groups = _groups_to_load(state[names[0]]["groups"], optimizer, ordered, opened.folder.url)
        optimizer.load_state_dict(keep_list_options(optimizer, {"state": entries, "param_groups": groups}))
    opened.set_random_state()


def optimizers_of(manifest: Manifest) -> list[int]:
    """Numbers of the optimizers whose states a checkpoint has."""
    return sorted({int(name.split("/")[1]) for name in manifest.objects if name.startswith(OPTIMIZER)})


def _prefix_of(optimizer: int | None) -> str:
    """What names of tensors begin with, of an optimizer by its number, or of the model."""
    return MODEL if optimizer is None else f"{OPTIMIZER}{optimizer}/"


def _values_of(names: Sequence[str], state: Mapping[str, Any]) -> dict[str, Any]:
    """What is no tensor in an optimizer's state."""
    values = {
        names[index]: own
        for index, entries in state["state"].items()
        if isinstance(entries, Mapping)
        if (own := {entry: value for entry, value in entries.items() if not isinstance(value, Tensor)})
    }
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in state["param_groups"]]
    return {"values": values, "groups": groups}


def _groups_to_load(
    saved: list[dict[str, Any]], optimizer: torch.optim.Optimizer, own: list[str], url: str
) -> list[dict[str, Any]]:
    names = iter(own)
    present = [[next(names) for _ in group["params"]] for group in optimizer.param_groups]
    if [group["params"] for group in saved] != present:
        there = {name for group in saved for name in group["params"]}
        differing = [name for name in own if name not in there] or [n for n in there if n not in own] or own
        raise StateMismatchError(
            f"{url}: its optimizer has {len(saved)} groups of {sum(len(g['params']) for g in saved)} parameters, here "
            f"there are {len(present)} of {len(own)}, or they are grouped or ordered in another way; the first that "
            f"differs is {differing[0]}"
        )
    numbers = iter(range(len(own)))  # the same names in the same order
    return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in saved]


def _stored(manifest: Manifest, prefix: str) -> dict[str, Stored]:
    return {
        name.removeprefix(prefix): Stored(entry.shape, getattr(torch, entry.dtype))
        for name, entry in manifest.tensors.items()
        if name.startswith(prefix)
    }


def _targets(prefix: str, to_fill: Iterable[TensorToFill]) -> dict[str, Held]:
    wanted = (replace(each, name=f"{prefix}{each.name}") for each in to_fill if each.part is not None)
    return {each.name: build.to_read(each) for each in wanted}


def tied(manifest: Manifest, filled: dict[str, Any]) -> dict[str, Any]:
    """Weights by all of their names, given one for each."""
    aliases = {
        name.removeprefix(MODEL): target.removeprefix(MODEL)
        for name, target in manifest.aliases.items()
        if name.startswith(MODEL)
    }
    return {**filled, **{name: filled[target] for name, target in aliases.items()}}


def _loaders_of(checkpoint: Mapping[str, Any]) -> Any:
    found: Any = checkpoint
    for key in _LOADERS:
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = found[key]
    return found


def _put_loaders(checkpoint: dict[str, Any], loaders: Any) -> None:
    inner: Any = checkpoint
    for key in _LOADERS[:-1]:
        if not isinstance(inner, dict) or key not in inner:
            return
        inner = inner[key]
    if loaders is not None:
        inner[_LOADERS[-1]] = loaders
