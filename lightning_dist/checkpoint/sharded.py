"""Save and load a flat state by all ranks of a group: torch's steps with our planners, writer and reader.

All is called by all ranks of the group alike, and ends alike: if one rank fails, all raise an error of the tree in
``errors`` that names the ranks that failed and why.

Note: loading does not go through ``dcp.load``.
    Its steps are made here. A rank reads what it needs whatever the others need, so no plans are sent to a coordinator.
    And a rank that has lost another says so at once; in torch's steps it would go on to wait for it in the next one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan

from lightning_dist.checkpoint import catalog
from lightning_dist.checkpoint.catalog import Checkpoint
from lightning_dist.checkpoint.load_planner import FillPlanner
from lightning_dist.checkpoint.manifest import Manifest
from lightning_dist.checkpoint.objects import Global
from lightning_dist.checkpoint.repeated import Repeatable
from lightning_dist.checkpoint.save_planner import CHUNK_BYTES, SharedSavePlanner, nothing_to_check
from lightning_dist.checkpoint.shard_reader import ShardReader
from lightning_dist.checkpoint.shard_writer import ShardWriter
from lightning_dist.checkpoint.storage import Folder
from lightning_dist.comm.host_relay import HostRelay, relayed
from lightning_dist.errors import CheckpointError, CollectiveError

_T = TypeVar("_T")

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
    written: Callable[[int], None] = lambda size_bytes: None,
    intact: Callable[[], None] = nothing_to_check,
    remember: Callable[[Repeatable], None] | None = None,
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
        written: See :class:`~lightning_dist.checkpoint.shard_stream.ShardStream`.
        intact: Raises if the state's values are not what they are to be; called before they are read, and after.
        remember: Takes what a :class:`~lightning_dist.checkpoint.repeated.Repeater` needs, once it is committed.

    Returns:
        The manifest on the group's first rank, ``None`` on the others.
    """
    writer = ShardWriter(folder, rank=rank, host=host, record=record, intact=intact, written=written)
    moment = {name: record[name] for name in MOMENT if name in record} if record is not None else {}
    planner = SharedSavePlanner(chunk_bytes=chunk_bytes, allow=allow, moment=moment, state=state, intact=intact)
    _together(
        f"saving {folder.url}",
        lambda alone: dcp.save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=alone),
    )
    if remember is not None and writer.plan is not None:
        remember(Repeatable(writer.plan, writer.manifest, writer.results))
    return writer.manifest


def load(
    state: dict[str, Any],
    folder: Folder,
    *,
    group: dist.ProcessGroup | None = None,
    manifest: Manifest | None = None,
    allow: Sequence[Global] = (),
    relay: HostRelay | None = None,
) -> None:
    """Fill a state from a checkpoint, whatever number of ranks and layout it was saved with.

    Args:
        state: See :class:`FillPlanner`.
        folder: Of the checkpoint.
        group: Whose ranks load.
        manifest: Of the checkpoint, if it has been read already, which it has with ``relay``.
        allow: See :func:`lightning_dist.checkpoint.objects.decode`.
        relay: The ranks of this host, if they are to read once what several of them need.
    """
    assert manifest is not None or relay is None, "ranks of a host read one checkpoint"
    reader, planner = ShardReader(folder, manifest=manifest, relay=relay), FillPlanner(allow=allow)

    def plan() -> LoadPlan:
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        planner.set_up_planner(state, metadata)
        return planner.create_local_plan()

    what = f"loading {folder.url}"
    own = _alike(what, plan, group, identity=lambda plan: reader.save_id)
    _alike(what, lambda: reader.read_data(own, planner).wait(), group)


def open_checkpoint(
    folder: Folder, *, group: dist.ProcessGroup | None = None, relay: HostRelay | None = None
) -> Checkpoint:
    """:func:`lightning_dist.checkpoint.catalog.open_checkpoint` on all ranks, which end alike.

    Args:
        folder: Of the checkpoint.
        group: Whose ranks open it.
        relay: The ranks of this host, if the first of them is to read the manifest for all.
    """

    def open_with_host(relay: HostRelay) -> Checkpoint | None:
        data: bytes | None = None
        failure: Exception | None = None
        if relay.index == 0:
            try:
                data = catalog.read_manifest_file(folder)
                catalog.check_sizes(Checkpoint(folder, catalog.parse_manifest(folder, data)))
            except Exception as error:  # raised once the others know that nothing comes
                data, failure = None, error
        data = relayed(relay, 0, data)
        relay.settle()
        if failure is not None:
            raise failure
        return None if data is None else Checkpoint(folder, catalog.parse_manifest(folder, data))

    opened = _alike(
        f"opening {folder.url}",
        lambda: catalog.open_checkpoint(folder) if relay is None else open_with_host(relay),
        group,
    )
    assert opened is not None, "where the first rank of a host has none, it has said why"
    return opened


class _Failure(NamedTuple):
    kind: type[CheckpointError]
    text: str


def _alike(
    what: str,
    call: Callable[[], _T],
    group: dist.ProcessGroup | None,
    *,
    identity: Callable[[_T], str] = lambda result: "",
) -> _T:
    """Call on all ranks; if it fails on any, all raise the same. A rank that is lost is raised at once.

    Args:
        what: For messages.
        call: What to do.
        group: The ranks.
        identity: Of a result, the id of a save; it must be alike on all ranks.
    """
    results: list[_T] = []
    cause: Exception | None = None
    try:
        results.append(call())
    except CollectiveError:
        raise
    except Exception as error:
        cause = error
    own = identity(results[0]) if cause is None else _failure_of(cause)
    said: list[str | _Failure | None] = [own]
    if dist.is_available() and dist.is_initialized():
        said = [None] * dist.get_world_size(group)
        dist.all_gather_object(said, own, group=group)
    failures = {rank: failure for rank, failure in enumerate(said) if isinstance(failure, _Failure)}
    if failures:
        raise _as_ours(what, failures) from cause
    if len(set(said)) > 1:
        seen = "; ".join(f"{_ranks(said, each)}: {each}" for each in sorted(set(map(str, said))))
        raise CheckpointError(
            f"{what}: ranks see the files of different saves there ({seen}). Was it saved over meanwhile, or do hosts "
            "see different storage?"
        )
    return results[0]


def _ranks(said: Sequence[object], what: str) -> str:
    found = [str(rank) for rank, each in enumerate(said) if each == what]
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(found)}"


def _together(what: str, call: Callable[[bool], object]) -> None:
    try:
        if dist.is_available() and dist.is_initialized():
            call(False)  # without touching warnings: filters are not a thread's own, and this may be a writer's thread
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            call(True)
    except CheckpointException as error:
        failures = {rank: _failure_of(failure[0]) for rank, failure in error.failures.items()}
        raise _as_ours(what, failures) from error


def _as_ours(what: str, failures: Mapping[int, _Failure]) -> CheckpointError:
    """One error for the failures of all ranks; of their own kind, if it is the same."""
    kinds = {failure.kind for failure in failures.values()}
    kind = kinds.pop() if len(kinds) == 1 else CheckpointError
    texts = {rank: failure.text for rank, failure in sorted(failures.items())}
    if len(set(texts.values())) == 1 and len(texts) > 1:
        said = f"ranks {', '.join(map(str, texts))}: {next(iter(texts.values()))}"
    else:
        said = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
    return kind(f"{what} failed on {said}")


def _failure_of(error: BaseException) -> _Failure:
    if isinstance(error, CheckpointError):
        return _Failure(type(error), str(error))
    return _Failure(CheckpointError, f"{type(error).__name__}: {error}")
