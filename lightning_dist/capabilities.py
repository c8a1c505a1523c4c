"""What combines with what: options that are each valid but have no effect together, or do not work together.

A setting that does nothing is not refused, since the same config may serve clusters on which it does something, but it
is said. What one group's own values refuse is in its dataclass (:mod:`lightning_dist.config`).
"""

from __future__ import annotations

import dataclasses

from lightning_dist.config import (
    ElasticConfig,
    LocalSGDConfig,
    ParallelConfig,
    ParameterServerConfig,
    RecomputeConfig,
    SparseConfig,
    SyncConfig,
    TopologyConfig,
)
from lightning_dist.config.pipeline import SPLIT_BACKWARD
from lightning_dist.errors import CombinationError

_GATHERING = ("zero1", "zero2", "zero3")
_LOSSY = ("int8", "onebit", "topk", "powersgd")
_BIASED = ("int8", "nearest")
_OF_CODECS = {
    "rounding": ("int8",),
    "ratio": ("topk",),
    "momentum_correction": ("topk",),
    "error_feedback": _LOSSY,
    "warmup_steps": _LOSSY,
}
_IN_PLACE = ("ddp", "zero1", "zero2", "zero3")


def refuse_combinations(
    parallel: ParallelConfig, topology: TopologyConfig, recompute: RecomputeConfig, sync: SyncConfig | None = None
) -> None:
    """Refuse groups that cannot work together, whatever the cluster; before any process starts.

    Raises:
        CombinationError: They cannot.
    """
    if parallel.splits and topology.tiers == "flat":
        asked = "parallel=tensor" if parallel.mode == "tensor" else f"parallel.tensor.size={parallel.tensor.size}"
        raise CombinationError(
            f"{asked} shares each layer inside a host, and topology=flat makes every rank a host of its own: write "
            "topology=auto (sync=flat is flat synchronisation of gradients)"
        )
    if sync is not None and sync.algorithm == "powersgd" and (parallel.splits or parallel.stages):
        where, instead = ("shared layers", "bf16") if parallel.splits else ("stages", "int8, onebit or topk")
        raise CombinationError(
            f"sync=powersgd with {where}: factors are of whole matrices, of which ranks have parts there, or none; "
            f"write sync={instead}, or parallel={', '.join(_IN_PLACE)} or hsdp"
        )
    if sync is not None and sync.algorithm == "local_sgd":
        _refuse_local_sgd(parallel, sync)
    encoded = f"sync.codec={sync.codec}" if sync is not None and sync.codec in _LOSSY else ""
    if sync is not None and sync.gathers != "same":
        encoded = encoded or f"sync.gathers={sync.gathers}"
    if parallel.splits and encoded:
        raise CombinationError(
            f"{encoded} with layers that are shared by ranks: values are encoded in blocks, of split and of whole "
            "parameters, and ranks that hold the same whole one would get different values of it: write sync=bf16 or "
            "sync=hierarchical"
        )
    if parallel.stages and recompute.mode == "budget":
        raise CombinationError(
            "recompute=budget with pipeline stages: it chooses blocks from what one backward frees, and a stage keeps "
            "several micro-batches at a time, how many depends on the stage: write recompute=full, every_n or selective"
        )
    schedule = parallel.pipeline.schedule
    if parallel.stages and schedule in SPLIT_BACKWARD and recompute.mode == "selective":
        raise CombinationError(
            f"recompute=selective with parallel.pipeline.schedule={schedule}, which walks each block twice in "
            "backward, and torch's selective checkpoints once: write recompute=full, or "
            "parallel.pipeline.schedule=interleaved_1f1b"
        )


def _refuse_local_sgd(parallel: ParallelConfig, sync: SyncConfig) -> None:
    if parallel.stages or parallel.splits or parallel.mode not in ("ddp", *_GATHERING):
        raise CombinationError(
            f"sync=local_sgd with parallel={parallel.mode}: a host is to train on its own, with the whole model or its "
            "shards; write parallel=ddp or zero2 (zero3, whose shards then lie inside hosts, as those of hsdp do)"
        )
    if parallel.cpu_offload:
        raise CombinationError(
            "parallel.cpu_offload=true with sync=local_sgd, whose outer weights lie beside the shards and travel from "
            "the device: write parallel.cpu_offload=false"
        )
    if sync.local_sgd.workers == "ranks" and parallel.mode != "ddp":
        raise CombinationError(
            f"sync.local_sgd.workers=ranks with parallel={parallel.mode}: shards lie inside a worker, and a rank has "
            "none to share with; write parallel=ddp, or sync.local_sgd.workers=hosts"
        )


def keeps_processes(parallel: ParallelConfig, device_type: str) -> bool:
    """Whether a process can be that of another start: nothing is left in it of a fit that has failed.

    Args:
        parallel: What becomes of the model.
        device_type: ``cpu`` or ``cuda``.
    """
    return parallel.mode in _IN_PLACE and device_type == "cpu"


def without_effect(
    sync: SyncConfig,
    topology: TopologyConfig,
    parallel: ParallelConfig,
    recompute: RecomputeConfig,
    elastic: ElasticConfig | None = None,
    *,
    num_hosts: int,
    device_type: str,
    has_agent: bool = False,
) -> tuple[str, ...]:
    """What was set and does nothing here, each with the reason and what to write instead.

    Args:
        sync: How gradients travel.
        topology: Who sits where, as configured.
        parallel: What becomes of the model.
        recompute: Which blocks run again in backward.
        elastic: What is to become of failures; ``None``: nobody has said.
        num_hosts: Hosts that were found.
        device_type: ``cpu`` or ``cuda``.
        has_agent: Whether ``hierdist launch`` has started the ranks.
    """
    return (
        *_elastic_without_effect(elastic, parallel, device_type=device_type, has_agent=has_agent),
        *_legs_without_effect(sync, topology, num_hosts=num_hosts),
        *_codec_without_effect(sync, parallel, num_hosts=num_hosts),
        *_rest_of_sync_without_effect(sync, parallel, device_type=device_type),
        *_parallel_without_effect(parallel, device_type=device_type),
        *_recompute_without_effect(recompute),
    )


def _elastic_without_effect(
    elastic: ElasticConfig | None, parallel: ParallelConfig, *, device_type: str, has_agent: bool
) -> list[str]:
    said = []
    if elastic is not None and (elastic.mode != "off" or elastic.in_place) and not has_agent:
        asked = f"elastic={elastic.mode}" if elastic.mode != "off" else "elastic.in_place=true"
        said.append(
            f"{asked} has no effect without an agent that starts ranks again: start the script with "
            "hierdist launch --hosts MIN:MAX --ranks-per-host N -- python ..., or write elastic=off"
        )
    if elastic is not None and elastic.in_place and has_agent and not keeps_processes(parallel, device_type):
        said.append(
            f"elastic.in_place=true has no effect with parallel={parallel.mode} on {device_type}, where ranks get new "
            f"processes: it is for parallel={' or '.join(_IN_PLACE)} on cpu; write elastic.in_place=false"
        )
    return said


def _legs_without_effect(sync: SyncConfig, topology: TopologyConfig, *, num_hosts: int) -> list[str]:
    said = []
    if topology.tiers == "flat" and sync.algorithm == "hierarchical":
        said.append(
            "sync.algorithm=hierarchical has no effect with topology.tiers=flat, which makes every rank a host of its "
            "own; write topology=auto, or sync=flat to say what is meant"
        )
    elif num_hosts == 1 and sync.algorithm == "powersgd":
        said.append("sync=powersgd has no effect on one host: nothing crosses between hosts; write sync=hierarchical")
    elif num_hosts == 1 and sync.algorithm == "local_sgd" and sync.local_sgd.workers == "hosts":
        said.append(
            "sync=local_sgd has no effect on one host, which is one worker: gradients are averaged each step; write "
            "sync=hierarchical, or sync.local_sgd.workers=ranks"
        )
    elif num_hosts == 1 and sync.codec != "same" and not sync.everywhere:
        said.append(
            f"sync.codec={sync.codec} has no effect on one host: nothing crosses between hosts; write sync=hierarchical"
        )
    if topology.switches and topology.tiers in ("flat", "two_tier"):
        said.append(
            f"topology.switches has no effect with topology.tiers={topology.tiers}; "
            "write topology.tiers=three_tier or auto"
        )
    if topology.probe.refresh and not topology.probe.enabled:
        said.append("topology.probe.refresh has no effect while topology.probe.enabled=false; enable the probe")
    return said


def _codec_without_effect(sync: SyncConfig, parallel: ParallelConfig, *, num_hosts: int) -> list[str]:
    loses = sync.algorithm if sync.algorithm == "powersgd" else sync.codec
    said = [
        f"sync.{name} has no effect with sync.codec={sync.codec}; write sync={' or '.join(allowed)}"
        for name, allowed in _OF_CODECS.items()
        if getattr(sync, name) != getattr(SyncConfig(), name) and loses not in allowed
    ]
    if sync.powersgd != SyncConfig().powersgd and sync.algorithm != "powersgd":
        said.append(f"sync.powersgd has no effect with sync.algorithm={sync.algorithm}; write sync=powersgd")
    said += _local_sgd_without_effect(sync, parallel)
    if sync.everywhere and (sync.codec == sync.gathers == "same" or (sync.algorithm == "flat" and num_hosts > 1)):
        said.append(
            f"sync.everywhere=true has no effect with sync.algorithm={sync.algorithm} and sync.codec={sync.codec}: "
            "there is no leg inside a host that could be encoded; write sync.everywhere=false, or sync=int8 with it"
        )
    gathering = (*_GATHERING, "hsdp") if sync.everywhere else _GATHERING
    if (
        sync.algorithm != "local_sgd"
        and sync.gathers != "same"
        and (parallel.mode not in gathering or (num_hosts == 1 and not sync.everywhere))
    ):
        said.append(
            f"sync.gathers={sync.gathers} has no effect with parallel.mode={parallel.mode} on {num_hosts} host(s): "
            "no parameters cross between hosts; write sync.gathers=same"
        )
    if not sync.error_feedback and (loses in ("onebit", "topk", "powersgd") or (sync.codec, sync.rounding) == _BIASED):
        said.append(
            f"sync.error_feedback=false with sync={loses}: what it loses of a gradient is lost for good, "
            "always to the same side, and training may end elsewhere; write sync.error_feedback=true"
        )
    return said


def _local_sgd_without_effect(sync: SyncConfig, parallel: ParallelConfig) -> list[str]:
    options, said = sync.local_sgd, []
    if sync.algorithm != "local_sgd":
        if options != LocalSGDConfig():
            said.append(f"sync.local_sgd has no effect with sync.algorithm={sync.algorithm}; write sync=local_sgd")
        return said
    if not options.outer_momentum and not options.nesterov:
        said.append("sync.local_sgd.nesterov has no effect with sync.local_sgd.outer_momentum=0; leave it out")
    if options.overlap_steps and options.kept == 0.0:
        said.append(
            f"sync.local_sgd.mixing=0 throws away the {options.overlap_steps} steps that are made while a fragment is "
            "on its way, so that they have no effect: write sync.local_sgd.mixing=0.5"
        )
    if sync.gathers != "same":
        said.append(
            f"sync.gathers={sync.gathers} has no effect with sync=local_sgd: parameters are gathered inside hosts; "
            "write sync.gathers=same"
        )
    if parallel.secondary_shard != "off" and parallel.shards:
        said.append(
            f"parallel.secondary_shard={parallel.secondary_shard} has no effect with sync=local_sgd, whose shards lie "
            "inside hosts anyway; write parallel.secondary_shard=off"
        )
    return said


def _rest_of_sync_without_effect(sync: SyncConfig, parallel: ParallelConfig, *, device_type: str) -> list[str]:
    said = []
    if sync.sparse != SparseConfig() and (parallel.splits or parallel.stages):
        where = "layers that are shared by ranks" if parallel.splits else "pipeline stages"
        said.append(
            f"sync.sparse has no effect with {where}, where embeddings cannot be sparse; write "
            f"parallel={', '.join(_IN_PLACE)} or hsdp"
        )
    served = sync.parameter_server
    if served.servers == "ranks" and (served.servers_per_host != 1 or served.replicas):
        name = "replicas" if served.replicas else "servers_per_host"
        said.append(
            f"sync.parameter_server.{name}={getattr(served, name)} has no effect with sync.parameter_server.servers="
            "ranks; write sync.parameter_server.servers=processes"
        )
    elif served != ParameterServerConfig() and sync.sparse.serves_above_bytes is None:
        said.append(
            f"sync.parameter_server has no effect with sync.sparse.exchange={sync.sparse.exchange}, which deals no "
            "table to servers; write sync=parameter_server or sync=auto"
        )
    if sync.shared_memory == "off" and device_type == "cuda":
        said.append("sync.shared_memory has no effect on CUDA, where in-host legs are NCCL's")
    return said


def _parallel_without_effect(parallel: ParallelConfig, *, device_type: str) -> list[str]:
    defaults = ParallelConfig()
    only_ddp = ("static_graph", "gradient_as_bucket_view")
    only_shards = ("shard_modules", "prefetch", "cpu_offload", "gather_dtype", "reduce_dtype")
    idle = (*(only_ddp if parallel.mode != "ddp" else ()), *(only_shards if not parallel.shards else ()))
    said = [
        f"parallel.{name} has no effect with parallel.mode={parallel.mode}"
        for name in idle
        if getattr(parallel, name) != getattr(defaults, name)
    ]
    if not parallel.splits:
        said += [
            f"parallel.tensor.{name} has no effect with parallel.mode={parallel.mode} unless parallel.tensor.size says "
            "how many ranks share a layer; write parallel=tensor, or a size"
            for name in ("plan", "loss_parallel")
            if getattr(parallel.tensor, name) != getattr(defaults.tensor, name)
        ]
    if not parallel.stages:
        said += [
            f"parallel.pipeline.{field.name} has no effect with parallel.mode={parallel.mode}; write parallel=pipeline"
            for field in dataclasses.fields(parallel.pipeline)
            if getattr(parallel.pipeline, field.name) != getattr(defaults.pipeline, field.name)
        ]
    if parallel.shards and parallel.cpu_offload and device_type == "cpu":
        said.append("parallel.cpu_offload has no effect on CPU, where shards live in host memory anyway")
    return said


def _recompute_without_effect(recompute: RecomputeConfig) -> list[str]:
    defaults, modes = RecomputeConfig(), {"every": ("every_n",), "budget": ("budget",)}
    said = [
        f"recompute.{name} has no effect with recompute.mode={recompute.mode}; write recompute={allowed[0]}"
        for name, allowed in modes.items()
        if getattr(recompute, name) != getattr(defaults, name) and recompute.mode not in allowed
    ]
    if recompute.modules is not None and recompute.mode == "off":
        said.append("recompute.modules has no effect with recompute.mode=off; write recompute=full")
    return said
