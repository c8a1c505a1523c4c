"""Error feedback, where gradients lose something on their way."""

from __future__ import annotations

import json
from typing import Any

from lightning_dist.build.run import RunContext
from lightning_dist.comm.codecs import codec_of
from lightning_dist.comm.feedback import Feedback
from lightning_dist.config import SyncConfig
from lightning_dist.gradsync.powersgd import LowRankFeedback


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

    Args:
        run: For the cluster.
        sync: Codec and options.
        mode: What becomes of the model, which says what gradients are made of.
    """
    codec = codec_of(sync)
    if codec is None or not codec.wants_feedback or (run.cluster.num_hosts == 1 and not sync.everywhere):
        return None
    layout = {
        "mode": mode,
        "hosts": _numbered_hosts(run),
        "algorithm": sync.algorithm,
        "codec": codec.name,
        "everywhere": sync.everywhere,
        "bytes": [sync.bucket_bytes, sync.chunk_bytes],
    }
    return Feedback(layout=json.dumps(layout), rank=run.rank, warmup_steps=sync.warmup_steps, keeps=sync.error_feedback)


def _numbered_hosts(run: RunContext) -> list[int]:
    """Of each rank: the first rank of its host."""
    hosts = run.cluster.host_of_rank
    return [hosts.index(host) for host in hosts]
