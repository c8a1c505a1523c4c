"""Where ranks can leave each other words beside training."""

from __future__ import annotations

import torch.distributed as dist


def default_store() -> dist.Store | None:
    """The store of the default process group; ``None``: there is no group."""
    if not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()  # the store has no public accessor
