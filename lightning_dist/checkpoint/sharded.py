"""Save and load a flat state by all ranks of a group: torch's steps with our planners, writer and reader.

Both are called by all ranks of the group alike, and end alike: if one rank fails, all raise an error of the tree in
``errors`` that names the ranks that failed and why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from lightning_dist.checkpoint.load_planner import FillPlanner
from lightning_dist.checkpoint.manifest import Manifest
from lightning_dist.checkpoint.objects import Global
from lightning_dist.checkpoint.save_planner import CHUNK_BYTES, SharedSavePlanner, nothing_to_check
from lightning_dist.checkpoint.shard_reader import ShardReader
from lightning_dist.checkpoint.shard_writer import ShardWriter
from lightning_dist.checkpoint.storage import Folder
from lightning_dist.errors import CheckpointError

MOMENT = ("step", "epoch")
"""Entries of a record that say of when a rank's values are."""


def save(
    state: dict[str, Any],
    folder: Folder,
    *,
    rank: int,
    host: str,
    group: dist.ProcessGroup | None = None,
    record: Mapping[str, Any] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    allow: Sequence[Global] = (),
    intact: Callable[[], None] = nothing_to_check,
) -> Manifest | None:
    """Write a checkpoint; when this returns, it is committed.

    Args:
        state: See :class:`SharedSavePlanner`.
        folder: Of the checkpoint; one that is there is replaced.
        rank: Global rank of this process.
        host: Name of its host.
        group: Whose ranks save; the default group, or this process alone where there is none.
        record: See :class:`Manifest`; what it has of :data:`MOMENT` must be alike on all ranks.
        chunk_bytes: See :class:`SharedSavePlanner`.
        allow: See :func:`lightning_dist.checkpoint.objects.encode`.
        intact: Raises if the state's values are not what they are to be; called before they are read, and after.

    Returns:
        The manifest on the group's first rank, ``None`` on the others.
    """
    writer = ShardWriter(folder, rank=rank, host=host, record=record, intact=intact)
    moment = {name: record[name] for name in MOMENT if name in record} if record is not None else {}
    planner = SharedSavePlanner(chunk_bytes=chunk_bytes, allow=allow, moment=moment, state=state, intact=intact)
    _together(
        f"saving {folder.url}",
        lambda alone: dcp.save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=alone),
    )
    return writer.manifest


def load(
    state: dict[str, Any],
    folder: Folder,
    *,
    group: dist.ProcessGroup | None = None,
    manifest: Manifest | None = None,
    allow: Sequence[Global] = (),
) -> None:
    """Fill a state from a checkpoint, whatever number of ranks and layout it was saved with.

    Args:
        state: See :class:`FillPlanner`.
        folder: Of the checkpoint.
        group: Whose ranks load.
        manifest: Of the checkpoint, if it has been read already.
        allow: See :func:`lightning_dist.checkpoint.objects.decode`.
    """
    reader, planner = ShardReader(folder, manifest=manifest), FillPlanner(allow=allow)
    _together(
        f"loading {folder.url}",
        lambda alone: dcp.load(state, storage_reader=reader, planner=planner, process_group=group, no_dist=alone),
    )


def _together(what: str, call: Callable[[bool], object]) -> None:
    try:
        if dist.is_available() and dist.is_initialized():
            call(False)  # without touching warnings: filters are not a thread's own, and this may be a writer's thread
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            call(True)
    except CheckpointException as error:
        raise _as_ours(what, error) from error


def _as_ours(what: str, error: CheckpointException) -> CheckpointError:
    """One error for the failures of all ranks; of their own kind, if it is the same."""
    reasons = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
    kinds = {type(reason) for reason in reasons.values()}
    kind = kinds.pop() if len(kinds) == 1 else CheckpointError
    texts = {rank: _text(reason) for rank, reason in reasons.items()}
    if len(set(texts.values())) == 1 and len(texts) > 1:
        said = f"ranks {', '.join(map(str, texts))}: {next(iter(texts.values()))}"
    else:
        said = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
    return (kind if issubclass(kind, CheckpointError) else CheckpointError)(f"{what} failed on {said}")


def _text(reason: BaseException) -> str:
    return str(reason) if isinstance(reason, CheckpointError) else f"{type(reason).__name__}: {reason}"
