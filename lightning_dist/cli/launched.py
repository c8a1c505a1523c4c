"""Who launched this process, for commands that run on all ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from lightning_dist.errors import CollectiveTimeoutError, LaunchError

# How launchers call a process's rank and the number of processes; the first pair that is set counts.
_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


class Place(NamedTuple):
    """Which of how many processes this is, and where they meet."""

    rank: int
    world_size: int
    address: str
    port: int


def launched_as(environ: Mapping[str, str]) -> Place | None:
    """This process's place under torchrun, SLURM, MPI or anything that sets their variables; ``None``: no launcher.

    The meeting point is ``MASTER_ADDR`` and ``MASTER_PORT``; under SLURM it follows from the list of nodes and the
    job's number where they are not set.

    Raises:
        LaunchError: A variable is missing or is not a number.
    """
    for rank_name, size_name in _RANK_VARIABLES:
        if environ.get(rank_name) and environ.get(size_name):
            break
    else:
        return None
    try:
        rank, world_size = int(environ[rank_name]), int(environ[size_name])
        address = environ.get("MASTER_ADDR") or _first_slurm_node(environ)
        port = environ.get("MASTER_PORT") or _slurm_port(environ)
        if address is None or port is None:
            if world_size > 1:
                raise LaunchError(
                    f"{size_name}={world_size}, but MASTER_ADDR and MASTER_PORT are not both set; set them to the host "
                    "of rank 0 and a free port there, or start the processes with torchrun"
                )
            return None
        return Place(rank, world_size, address, int(port))
    except ValueError as error:
        raise LaunchError(f"{rank_name}, {size_name} and MASTER_PORT must be numbers: {error}") from error


def _first_slurm_node(environ: Mapping[str, str]) -> str | None:
    """First of a list like ``node[03-05,9],other``."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodes:
        return None
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?", nodes)
    return match.group(1) + (match.group(2) or "") if match else None


def _slurm_port(environ: Mapping[str, str]) -> str | None:
    """A port that all tasks of a job agree on and that two jobs rarely share."""
    job = environ.get("SLURM_JOB_ID")
    return str(15000 + int(job[-4:])) if job else None


@contextmanager
def rendezvous(place: Place, timeout_s: float) -> Iterator[tuple[dist.Store, dist.ProcessGroup]]:
    """A store and a Gloo group of all processes. Leaving it waits for all: rank 0 may keep the store others read."""
    address = f"[{place.address}]" if ":" in place.address else place.address
    url = f"tcp://{address}:{place.port}?rank={place.rank}&world_size={place.world_size}"
    timeout = timedelta(seconds=timeout_s)
    try:
        store, _, _ = next(dist.rendezvous(url, timeout=timeout))
        store.set_timeout(timeout)
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
    except RuntimeError as error:
        raise CollectiveTimeoutError(
            f"rank {place.rank} of {place.world_size} did not meet the others at {place.address}:{place.port} within "
            f"{timeout_s:g} s: {error}"
        ) from error
    try:
        group = dist.group.WORLD
        assert group is not None
        yield dist.PrefixStore("hierdist", store), group
        dist.barrier()
    finally:
        dist.destroy_process_group()
