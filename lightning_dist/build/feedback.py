"""Error feedback, where gradients lose something on their way."""

from __future__ import annotations

import json

from lightning_dist.build.run import RunContext
from lightning_dist.comm.codecs import codec_of
from lightning_dist.comm.feedback import Feedback
from lightning_dist.config import SyncConfig


def feedback_of(run: RunContext, sync: SyncConfig, *, mode: str) -> Feedback | None:
    """The accounts of this rank; ``None`` where nothing is lost, or so little that it need not be kept.

    Args:
        run: For the cluster.
        sync: Codec and options.
        mode: What becomes of the model, which says what gradients are made of.
    """
    codec = codec_of(sync)
    if codec is None or not codec.wants_feedback or run.cluster.num_hosts == 1:
        return None
    hosts = run.cluster.host_of_rank
    layout = {
        "mode": mode,
        "hosts": [hosts.index(host) for host in hosts],
        "algorithm": sync.algorithm,
        "codec": codec.name,
        "bytes": [sync.bucket_bytes, sync.chunk_bytes],
    }
    return Feedback(layout=json.dumps(layout), rank=run.rank, warmup_steps=sync.warmup_steps, keeps=sync.error_feedback)
