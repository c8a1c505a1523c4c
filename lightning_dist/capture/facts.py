"""What a run's files say of the run and of each rank, read from a Trainer."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import time
import uuid
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_dist.capture.commit import commit_of_script
from lightning_dist.capture.loader_facts import loader_facts
from lightning_dist.capture.options import options_of, strategy_name
from lightning_dist.elastic.launched import launched
from lightning_dist.monitor.peaks import peak_flops as peak_flops_of
from lightning_dist.monitor.record import RankHeader, RunFacts
from lightning_dist.topology.discover import host_identity

_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_PACKAGES = ("torch", "lightning", "lightning-dist")


def run_facts(
    trainer: pl.Trainer, *, peak_flops: float | None = None, flops_per_sample: float | None = None
) -> RunFacts:
    """What is the same for all ranks."""
    options = options_of(trainer)
    text = json.dumps(options, sort_keys=True)
    launch = launched(os.environ)
    return RunFacts(
        run_id=uuid.uuid4().hex,
        started=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        world_size=trainer.world_size,
        strategy=strategy_name(trainer),
        options=options,
        config_hash=hashlib.sha256(text.encode()).hexdigest()[:16],
        commit=commit_of_script(),
        versions={"python": platform.python_version(), **_versions()},
        peak_flops=peak_flops if peak_flops is not None else _peak_flops(trainer),
        flops_per_sample=flops_per_sample,
        run=launch.run or "",
        round=launch.round,
        record=launch.record,
    )


def rank_header(
    trainer: pl.Trainer, *, unavailable: Mapping[str, str], facts: Mapping[str, Any] | None = None
) -> RankHeader:
    """Who this rank is."""
    device = trainer.strategy.root_device
    return RankHeader(
        rank=trainer.global_rank,
        local_rank=trainer.local_rank,
        host=_host(trainer),
        device=str(device) if device.type != "cuda" else f"{device} {torch.cuda.get_device_name(device)}",
        pid=os.getpid(),
        started_wall_ns=time.time_ns(),
        started_ns=time.monotonic_ns(),
        unavailable=dict(unavailable),
        facts={**loader_facts(trainer), "data_parallel_rank": _data_rank(trainer), **_of_process(), **(facts or {})},
    )


def _peak_flops(trainer: pl.Trainer) -> float | None:
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return None
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return peak_flops_of(torch.cuda.get_device_name(device), str(trainer.precision), tf32=tf32)


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name.replace("-", "_")] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _host(trainer: pl.Trainer) -> str:
    """As the topology names it, or would."""
    run = getattr(trainer.strategy, "run_context", None)
    if run is not None:
        return str(run.collectives.host_of_rank[trainer.global_rank])
    identity = host_identity(os.environ)
    return identity.label if trainer.num_nodes == 1 else identity.name


def _of_process() -> dict[str, Any]:
    """Threads that compute, the interfaces that the user has named for what ranks send each other, and which start."""
    named = (os.environ.get(name) for name in _INTERFACES)
    return {
        "threads": torch.get_num_threads(),
        "interface": next((each for each in named if each), None),
        "round": launched(os.environ).round,
    }


def _data_rank(trainer: pl.Trainer) -> int:
    """Ranks that read the same samples say the same."""
    known = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return int(known["rank"]) if isinstance(known, Mapping) and "rank" in known else trainer.global_rank
