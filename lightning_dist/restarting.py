"""A run that is started again goes on where it was, whatever its script says.

The script is the same as at the first start: it makes a Trainer, and asks it to begin anew or at an older checkpoint.
Where Lightning is about to read that, the newest checkpoint of this run is read instead, from memory or from storage,
if there is one. Every rank takes part; rank 0 looks into storage.

Note [what counts as this run's]
    A folder may hold checkpoints of earlier runs. Sharded ones carry the run's name, if it has one; under ``hierdist
    launch`` a run that is launched again by its name goes on from them. Files of Lightning's do not: of these, those
    count that were written since the run was first started, which the agent's folder says, or the age of torchrun.
"""

from __future__ import annotations

import math
import os
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import lightning.pytorch as pl
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_dist.checkpoint.catalog import survey
from lightning_dist.checkpoint.lineage import Lineage, step_of
from lightning_dist.checkpoint.storage import open_folder
from lightning_dist.config.checks import is_url
from lightning_dist.elastic import trail
from lightning_dist.elastic.launched import Launched, launched
from lightning_dist.elastic.trail import Trail
from lightning_dist.errors import CheckpointError, StorageError

_T = TypeVar("_T")
_INTERRUPTED = "interrupted-step="


class Stored(NamedTuple):
    """A checkpoint in storage.

    Attributes:
        path: Path or URL.
        step: Optimizer steps done; -1 where only reading it would say.
        saved_s: When, seconds since 1970.
    """

    path: str
    step: int
    saved_s: float


@dataclass(frozen=True)
class Ways:
    """What going on needs of the strategy; all are called by every rank alike.

    Attributes:
        broadcast: An object of rank 0's, to all.
        first_of: Of what ranks have, that of the lowest that has something.
        load_kept: Look for the newest in memory that this run has saved into a folder, further than a step, and make it
            what is loaded next: its path and step.
        is_first_of_host: Whether this rank speaks for its host.
    """

    broadcast: Callable[[Any], Any]
    first_of: Callable[[Any], Any]
    load_kept: Callable[[str, Lineage, int], tuple[str, int] | None]
    is_first_of_host: bool


@runtime_checkable
class ComparesSizes(Protocol):
    """A callback to whom it matters how many ranks the run had at first (:mod:`~lightning_dist.resized`)."""

    def begin_resized(self, trainer: pl.Trainer, ranks: int) -> None:
        """The run was first started with so many ranks, and begins anew; before optimizers and loaders are made."""


class GoingOn:
    """Where a fit goes on from, if its run has been started before.

    Args:
        trainer: About to fit; its loops and callbacks are not set up.
        launched: Which start this is.
        ways: See there.
    """

    def __init__(self, trainer: pl.Trainer, launched: Launched, ways: Ways) -> None:
        self._trainer = trainer
        self._launched = launched
        self._ways = ways
        self._callbacks = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
        self._unnamed = [each for each in self._callbacks if each.dirpath is None]
        self._trail: Trail | None = None

    def begin(self) -> None:
        """Before callbacks are set up."""
        folder = self._launched.agent
        self._trail = trail.find(folder) if folder is not None else None
        if not (self._launched.is_restart or self._launched.owns_name):
            return
        if folder is not None:
            self._trail = self._ways.first_of(self._trail)
        if self._trail is not None and self._trail.unnamed is not None:
            for callback in self._unnamed:
                callback.dirpath = self._trail.unnamed
        connector: Any = self._trainer._checkpoint_connector

        def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
            vars(connector).pop("resume_start", None)
            self._resume(checkpoint_path, weights_only)

        connector.resume_start = resume_start

    def leave_trail(self) -> None:
        """Once callbacks are set up: for the next start."""
        folder = self._launched.agent
        if folder is None or not self._ways.is_first_of_host:
            return
        is_restart = self._launched.is_restart
        known = self._trail or (Trail(math.inf) if is_restart else Trail(time.time(), ranks=self._trainer.world_size))
        unnamed = next((str(each.dirpath) for each in self._unnamed if each.dirpath is not None), known.unnamed)
        self._trail = replace(known, folders=tuple(dict.fromkeys([*known.folders, *self._folders()])), unnamed=unnamed)
        trail.leave(folder, self._trail)

    def _folders(self) -> list[str]:
        found = [str(each.dirpath) for each in self._callbacks if each.dirpath is not None]
        return list(dict.fromkeys(found)) or [checkpoint_folder(self._trainer)]

    def _resume(self, asked: Any, weights_only: bool | None) -> None:
        connector: Any = self._trainer._checkpoint_connector

        def load(path: Any) -> None:
            type(connector).resume_start(connector, path, weights_only)

        lineage = self._lineage()
        folders = list(dict.fromkeys([*(self._trail.folders if self._trail else ()), *self._folders()]))
        folders = self._ways.broadcast(folders)
        stored, problem = self._ways.broadcast(_stored(folders, lineage) if self._trainer.is_global_zero else None)
        newest_step = stored[0].step if stored else -1
        for folder in folders:
            if self._read_kept(folder, lineage, newest_step, load):
                return
        if problem is not None:
            raise CheckpointError(f"cannot find out where to go on: {problem}")
        for each in stored:
            try:
                load(each.path)
            except CheckpointError as error:  # the same on all ranks
                warnings.warn(f"a checkpoint is skipped: {error}", stacklevel=2)
                continue
            self._say(each.step, each.path)
            return
        if self._launched.is_restart:
            began = f"at {asked}, as the script says" if asked else "anew"
            rank_zero_info(f"hierdist: {self._start} begins {began}: nothing of it was saved")
            self._begin_at_first_size()
        load(asked)

    def _begin_at_first_size(self) -> None:
        """No checkpoint says what the run's first size was; its hosts know."""
        ranks = 0 if self._trail is None else self._trail.ranks
        callbacks: list[pl.Callback] = self._trainer.callbacks  # type: ignore[attr-defined]  # made in __init__
        for callback in callbacks:
            if ranks and isinstance(callback, ComparesSizes):
                callback.begin_resized(self._trainer, ranks)

    def _read_kept(self, folder: str, lineage: Lineage, newer_than: int, load: Callable[[Any], None]) -> bool:
        kept = self._ways.load_kept(folder, lineage, newer_than)
        if kept is None:
            return False
        path, step = kept
        try:
            load(path)
        except CheckpointError as error:  # the same on all ranks
            warnings.warn(f"what is in memory is not read: {error}", stacklevel=2)
            return False
        self._say(step, "memory")
        return True

    def _say(self, step: int, source: str) -> None:
        step = self._trainer._checkpoint_connector._loaded_checkpoint.get("global_step", step)
        hint = "" if self._launched.is_restart else "; another --run begins anew"
        rank_zero_info(f"hierdist: {self._start} goes on after step {step}, from {source}{hint}")

    @property
    def _start(self) -> str:
        is_restart, run, number = self._launched.is_restart, self._launched.run, self._launched.round
        return f"start {number} of this run" if is_restart else f"run {run}, which was launched before,"

    def _lineage(self) -> Lineage:
        begun_s = self._trail.begun_s if self._trail is not None else None
        if begun_s is None and self._launched.agent is None and "TORCHELASTIC_RUN_ID" in os.environ:
            begun_s = trail.started_s(os.getppid())
        return Lineage(self._launched.run, math.inf if begun_s is None else begun_s, self._launched.owns_name)


def go_on_elsewhere(trainer: pl.Trainer, environ: Mapping[str, str]) -> GoingOn | None:
    """Let a fit go on under a strategy that is not ours; from storage, since nothing is kept in memory there.

    For the ``setup`` of a callback. Every rank calls it. Where a strategy of ours sees to it, or another callback has
    done so, there is nothing to do.

    Args:
        trainer: About to fit.
        environ: Says who has started this process.
    """
    strategy: Any = trainer.strategy
    has_begun = "resume_start" in vars(trainer._checkpoint_connector)
    if trainer.state.fn != TrainerFn.FITTING or hasattr(strategy, "run_context") or has_begun:
        return None

    def first_of(own: Any) -> Any:
        said = (strategy.broadcast(own, rank) for rank in range(trainer.world_size))
        return next((each for each in said if each is not None), None)

    ways = Ways(strategy.broadcast, first_of, lambda *_: None, is_first_of_host=trainer.local_rank == 0)
    going_on = GoingOn(trainer, launched(environ), ways)
    going_on.begin()
    return going_on


def checkpoint_folder(trainer: pl.Trainer) -> str:
    """Where checkpoints go that no callback asks for: the first callback's folder, else one below the Trainer's."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            return str(callback.dirpath).rstrip("/")
    return f"{str(trainer.default_root_dir).rstrip('/')}/checkpoints"


def interrupted_path(trainer: pl.Trainer) -> str:
    """Of the checkpoint that a run leaves in storage when it is asked to stop."""
    return f"{checkpoint_folder(trainer)}/{_INTERRUPTED}{trainer.global_step}{ModelCheckpoint.FILE_EXTENSION}"


def older_interrupted(path: str) -> list[str]:
    """Those beside it that another stop has left."""
    parent, _, own = path.rpartition("/")
    names = [name for name in open_folder(parent).list() if name.startswith(_INTERRUPTED) and name != own]
    return [f"{parent}/{name}" for name in names]


def _stored(folders: Iterable[str], lineage: Lineage) -> tuple[list[Stored], str | None]:
    """This run's checkpoints in storage, the newest first, and why a folder could not be looked into."""
    sharded: list[Stored] = []
    files: list[Stored] = []
    problem = None
    for folder in folders:
        try:
            found = survey(open_folder(folder))
            files += _files(folder, lineage)
        except (StorageError, OSError) as error:
            problem = f"{folder}: {error}"
            continue
        sharded += [
            Stored(f"{folder.rstrip('/')}/{each.name}", step_of(each.checkpoint), each.checkpoint.manifest.created_s)
            for each in lineage.newest_first(found)
            if each.checkpoint is not None
        ]
    sharded.sort(key=lambda each: (each.step, each.saved_s), reverse=True)
    files.sort(key=lambda each: each.saved_s, reverse=True)
    if sharded and files and files[0].saved_s > sharded[0].saved_s:
        return files + sharded, problem
    return sharded + files, problem


def _files(folder: str, lineage: Lineage) -> list[Stored]:
    """Lightning's own checkpoints, of one file each; on a disk those that are torn are left out."""
    filesystem = get_filesystem(folder)
    if not filesystem.isdir(folder):
        return []
    found = []
    for entry in filesystem.ls(folder, detail=True):
        path = str(entry["name"])
        if entry["type"] != "file" or not path.endswith(ModelCheckpoint.FILE_EXTENSION):
            continue
        saved_s = _seconds(filesystem.modified(path))
        path = str(filesystem.unstrip_protocol(path)) if is_url(folder) else path
        if saved_s >= lineage.begun_s and (is_url(folder) or zipfile.is_zipfile(path)):
            found.append(Stored(path, -1, saved_s))
    return found


def _seconds(modified: Any) -> float:
    return float(modified.timestamp()) if hasattr(modified, "timestamp") else float(modified)
