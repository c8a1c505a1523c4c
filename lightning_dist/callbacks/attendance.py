"""Whether a doctor examines all ranks of a run: one that it does not would wait for another collective than they do."""

from __future__ import annotations

import datetime

import torch.distributed as dist

from lightning_dist.errors import LaunchError

WAIT_S = 60.0  # all ranks come here from the same barrier
_PREFIX = "hierdist/doctor/"


def meet(store: dist.Store, rank: int, world_size: int, *, wait_s: float = WAIT_S) -> None:
    """Wait until all ranks are here; called by each, and any number of times.

    Args:
        store: Of the default process group.
        rank: Global rank.
        world_size: How many ranks there are.
        wait_s: How long to wait.

    Raises:
        LaunchError: Some did not come.
    """
    ours = dist.PrefixStore(_PREFIX, store)
    ours.set(f"rank/{rank}", "here")
    if ours.add("count", 1) >= world_size:
        ours.set("all", "here")
    try:
        ours.wait(["all"], datetime.timedelta(seconds=wait_s))
    except RuntimeError as error:
        missing = [other for other in range(world_size) if not ours.check([f"rank/{other}"])]
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise LaunchError(
            f"hierdist doctor examines rank {rank}, but within {wait_s:g} s nothing was heard of {len(missing)} of "
            f"{world_size} ranks ({shown}); run it on each host, around that host's command: "
            "hierdist doctor --output SHARED -- torchrun ... train.py"
        ) from error
