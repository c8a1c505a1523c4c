"""What keepers hold, for humans."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_dist.checkpoint.catalog import survey
from lightning_dist.checkpoint.keeper.client import Keeper
from lightning_dist.checkpoint.keeper.folder import KeptFolder
from lightning_dist.checkpoint.keeper.messages import NoKeeperError


@dataclass(frozen=True)
class Summary:
    """What a keeper holds.

    Attributes:
        keeper: Which.
        job: Folder of the checkpoints that it belongs to.
        process: Its number.
        used_bytes: What it holds.
        limit_bytes: What it may hold.
        ranks: How many of a run are attached to it; it ends some time after the last.
        steps: Of the committed checkpoints that it has files of, the newest first.
        newest_s: When the newest was committed, seconds since 1970; ``None`` if there is none.
    """

    keeper: Keeper
    job: str
    process: int
    used_bytes: int
    limit_bytes: int
    ranks: int
    steps: tuple[int | None, ...]
    newest_s: float | None


def summarize(keepers: Iterable[Keeper]) -> list[Summary]:
    """Ask keepers of this host; those that end meanwhile are left out."""
    summaries = []
    for keeper in keepers:
        with contextlib.suppress(NoKeeperError):
            summaries.append(_summary(keeper))
    return summaries


def _summary(keeper: Keeper) -> Summary:
    about = keeper.about()
    # Each host has the manifest and the marker of every checkpoint, and shards of its own ranks only.
    manifests = [entry.checkpoint.manifest for entry in survey(KeptFolder([keeper])) if entry.checkpoint is not None]
    return Summary(
        keeper,
        job=about["job"],
        process=about["process"],
        used_bytes=about["used_bytes"],
        limit_bytes=about["limit_bytes"],
        ranks=about["attached"],
        steps=tuple(manifest.record.get("step") for manifest in manifests),
        newest_s=max((manifest.created_s for manifest in manifests), default=None),
    )
