"""What a run's files say of the run and of each rank, read from a Trainer."""

from __future__ import annotations

import dataclasses
import datetime
import enum
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
from lightning_dist.monitor.peaks import peak_flops as peak_flops_of
from lightning_dist.monitor.record import RankHeader, RunFacts
from lightning_dist.topology.discover import host_identity

_TRAINER_OPTIONS = (
    "accumulate_grad_batches",
    "check_val_every_n_epoch",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "log_every_n_steps",
    "max_epochs",
    "max_steps",
    "num_devices",
    "num_nodes",
    "precision",
    "val_check_interval",
)
_CONFIGS = ("parallel", "sync", "topology", "recompute", "checkpoint")
_PACKAGES = ("torch", "lightning", "lightning-dist")


def run_facts(
    trainer: pl.Trainer, *, peak_flops: float | None = None, flops_per_sample: float | None = None
) -> RunFacts:
    """What is the same for all ranks."""
    options = options_of(trainer)
    text = json.dumps(options, sort_keys=True, default=str)
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
        facts={**loader_facts(trainer), "data_parallel_rank": _data_rank(trainer), **(facts or {})},
    )


def _peak_flops(trainer: pl.Trainer) -> float | None:
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return None
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return peak_flops_of(torch.cuda.get_device_name(device), str(trainer.precision), tf32=tf32)


def strategy_name(trainer: pl.Trainer) -> str:
    """``hierdist zero2``, or the class of another strategy."""
    parallel = getattr(trainer.strategy, "parallel_config", None)
    return type(trainer.strategy).__name__ if parallel is None else f"hierdist {parallel.mode}"


def options_of(trainer: pl.Trainer) -> dict[str, Any]:
    """The options of the Trainer and of our strategy, flat, by name."""
    found: dict[str, Any] = {}
    for name in _TRAINER_OPTIONS:
        value = getattr(trainer, name, None)
        found[f"trainer.{name}"] = _plain(value)
    found["trainer.accelerator"] = trainer.strategy.root_device.type
    found["trainer.strategy"] = strategy_name(trainer)
    for group in _CONFIGS:
        config = getattr(trainer.strategy, f"{group}_config", None)
        if dataclasses.is_dataclass(config):
            found.update(_flat(group, config))
    ddp = getattr(trainer.strategy, "_ddp_kwargs", None)  # of Lightning's DDPStrategy
    if isinstance(ddp, Mapping):
        found["ddp.bucket_cap_mb"] = _plain(ddp.get("bucket_cap_mb", 25))
        found.update({f"ddp.{name}": _plain(value) for name, value in ddp.items() if name != "bucket_cap_mb"})
    return found


def _flat(prefix: str, config: Any) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = f"{prefix}.{field.name}"
        flat.update(_flat(name, value) if dataclasses.is_dataclass(value) else {name: _plain(value)})
    return flat


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


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


def _data_rank(trainer: pl.Trainer) -> int:
    """Ranks that read the same samples say the same."""
    known = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return int(known["rank"]) if isinstance(known, Mapping) and "rank" in known else trainer.global_rank
