"""Epochs of one arm on all ranks: how long each took, which samples came, and what shared storage sent."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.data.arms import ARMS, Place
from benchmarks.data.peers import quiet
from tests.support.http_store import Counted, counted_at
from tests.support.tasks import RankContext

MS_BIND = 4096


@dataclass(frozen=True)
class Job:
    """What the ranks are to do.

    Attributes:
        arm: Key of :data:`~benchmarks.data.arms.ARMS`.
        folder: The data set in the arm's format.
        store_url: Of the store that serves the folder above it as the bucket ``data``; ``None``: read from disk.
        scratch: Folder in which each host has one for its cache.
        memory: Folder in which each host has one for its shared memory.
        batch_size: Samples a batch.
        epochs: How many; the first starts with an empty cache.
    """

    arm: str
    folder: Path
    store_url: str | None
    scratch: Path
    memory: Path
    batch_size: int
    epochs: int


@dataclass
class Epoch:
    """One epoch on one rank. Times are of the machine's monotonic clock.

    Attributes:
        start_s: The first batch was asked for.
        first_s: It was there.
        end_s: The last was.
        samples: Numbers of those that came.
        link_bytes: What the store's link sent during it; on rank 0, and only with a store.
        served_bytes: Of that, bytes of files.
    """

    start_s: float
    first_s: float = 0.0
    end_s: float = 0.0
    samples: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    link_bytes: int = 0
    served_bytes: int = 0


@dataclass
class Ran:
    """What a rank saw.

    Attributes:
        open_s: Seconds to open the data set.
        epochs: One after the other.
    """

    open_s: float
    epochs: list[Epoch]


def run_epochs(context: RankContext, job: Job) -> Ran:
    """Read a few epochs on this rank."""
    quiet()
    _have_own_shared_memory(job.memory / context.host)
    hosts = list(context.placement.as_dict().values())
    host_of = tuple(next(i for i, ranks in enumerate(hosts) if r in ranks) for r in range(context.world_size))
    name = job.folder.name
    place = Place(
        folder=job.folder,
        url=None if job.store_url is None else f"{job.store_url}/data/{name}",
        s3_url=None if job.store_url is None else f"s3://data/{name}",
        cache=job.scratch / context.host,
        batch_size=job.batch_size,
        rank=context.rank,
        host_of=host_of,
    )
    before = _counted(context, job)
    start_s = time.monotonic()
    batches = ARMS[job.arm].open(place)
    ran = Ran(time.monotonic() - start_s, [])
    for number in range(job.epochs):
        if number:
            before = _counted(context, job)
        context.barrier()
        epoch = Epoch(start_s=time.monotonic())
        seen: list[torch.Tensor] = []
        for batch in batches(number):
            if not seen:
                epoch.first_s = time.monotonic()
            seen.append(batch[:, 0].clone())
        epoch.end_s = time.monotonic()
        epoch.samples = torch.cat(seen).numpy() if seen else epoch.samples
        after = _counted(context, job)
        if before is not None and after is not None:
            epoch.link_bytes = after.link_bytes - before.link_bytes
            epoch.served_bytes = after.served_bytes - before.served_bytes
        ran.epochs.append(epoch)
    return ran


def _counted(context: RankContext, job: Job) -> Counted | None:
    """What the store has sent when all ranks are here; asked by one of them."""
    context.barrier()
    found = None
    if job.store_url is not None and context.rank == 0:
        found = counted_at(job.store_url)
    context.barrier()
    return found


def _have_own_shared_memory(folder: Path) -> None:
    """Hosts on one machine have one /dev/shm, where a library's names would meet those of its other host.

    A rank in a network namespace has mounts of its own, so this is seen by it and its children only.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(str(folder).encode(), b"/dev/shm", None, MS_BIND, None) != 0:
        raise OSError(ctypes.get_errno(), f"mount --bind {folder} /dev/shm")
