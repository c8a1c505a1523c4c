"""Error feedback, where gradients lose something on their way."""

from __future__ import annotations

import json
from typing import Any

from lightning_dist.build.run import RunContext
from lightning_dist.comm.codecs import codec_of
from lightning_dist.comm.feedback import Feedback
from lightning_dist.config import SyncConfig
from lightning_dist.gradsync.powersgd import LowRankFeedback

BETWEEN_WORKERS = ", between workers"
"""Ends the mode of what is owed of weights that workers have gone, and not of gradients."""


def low_rank_feedback_of(run: RunContext, sync: SyncConfig, *, mode: str = "ddp") -> LowRankFeedback | None:
    """Accounts and factors of ``sync=powersgd``; ``None`` where gradients travel whole, on one host too.

    Args:
        run: For the cluster.
        sync: Options.
        mode: What becomes of the model. Unless it is whole on each rank, what a rank keeps depends on its host, too.
    """
    if sync.algorithm != "powersgd" or run.cluster.num_hosts == 1:
        return None
    layout: dict[str, Any] = {
        "ranks": run.cluster.world_size,
        "algorithm": sync.algorithm,
        "columns": sync.powersgd.rank,
    }
    if mode != "ddp":
        layout |= {"mode": mode, "hosts": _numbered_hosts(run)}
    return LowRankFeedback(
        layout=json.dumps(layout),
        rank=run.rank,
        world_size=run.cluster.world_size,
        columns=sync.powersgd.rank,
        warm_start=sync.powersgd.warm_start,
        warmup_steps=sync.warmup_steps,
        keeps=sync.error_feedback,
    )


def feedback_of(run: RunContext, sync: SyncConfig, *, mode: str) -> Feedback | None:
    """The accounts of this rank; ``None`` where nothing is lost, or so little that it need not be kept.

    Where these options lose nothing because nothing crosses, as on one host, accounts stay empty, but what a run on
    several hosts has left owed is taken over and applied.

    Args:
        run: For the cluster.
        sync: Codec and options.
        mode: What becomes of the model, which says what gradients are made of.
    """
    codec, crosses = codec_of(sync), run.cluster.num_hosts > 1
    is_low_rank = sync.algorithm == "powersgd"
    if (is_low_rank and crosses) or not (is_low_rank or (codec is not None and codec.wants_feedback)):
        return None
    momentum = sync.momentum_correction if sync.codec == "topk" else 0.0
    layout = {
        "mode": mode,
        "hosts": _numbered_hosts(run),
        "algorithm": sync.algorithm,
        "codec": "same" if codec is None else codec.name,
        "everywhere": sync.everywhere,
        "bytes": [sync.bucket_bytes, sync.chunk_bytes],
        "momentum": momentum,
    }
    return Feedback(
        layout=json.dumps(layout),
        rank=run.rank,
        warmup_steps=sync.warmup_steps,
        keeps=sync.error_feedback,
        loses=crosses or (sync.everywhere and run.cluster.world_size > 1),
        momentum=momentum,
    )


def handed_on(run: RunContext) -> Feedback:
    """Accounts of a run that loses nothing and keeps nothing: what another has left owed goes through them, once."""
    return Feedback(layout=json.dumps({"mode": "exact"}), rank=run.rank, keeps=False, loses=False)


def can_take_over(saved: str, present: str) -> bool:
    """Whether what a run owed is of what another sends, whatever its ranks.

    What is owed of weights is never added to gradients, nor the other way; and of shards that workers average it stays
    with those who have them.

    Args:
        saved: Layout of the accounts that were saved.
        present: Layout of those that are to take over.
    """
    if saved == present:
        return True
    modes = [str(json.loads(layout).get("mode", "ddp")) for layout in (saved, present)]
    between = [mode.endswith(BETWEEN_WORKERS) for mode in modes]
    return not any(between) or (all(between) and all(mode.startswith("ddp,") for mode in modes))


def _numbered_hosts(run: RunContext) -> list[int]:
    """Of each rank: the first rank of its host."""
    hosts = run.cluster.host_of_rank
    return [hosts.index(host) for host in hosts]
