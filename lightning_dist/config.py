"""Every option of the library: its meaning, unit, default and validation.

The dataclasses are the schema of the Hydra groups in ``conf/`` and the arguments behind
:class:`~lightning_dist.strategy.HierDistStrategy`. They hold plain values only (no torch), are frozen, and check
themselves when made, so that a bad value is refused before any process starts.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lightning_dist.errors import CombinationError, ConfigError, unknown_option

SHARDING_MODES = ("zero1", "zero2", "zero3", "hsdp")
PARALLEL_MODES = ("ddp", *SHARDING_MODES, "tensor")
TENSOR_PLANS = ("auto", "gpt", "huggingface", "mlp")
SECONDARY_SHARDS = ("off", "host")
SHARD_DTYPES = ("same", "fp32", "bf16", "fp16")
SYNC_ALGORITHMS = ("flat", "hierarchical")
WIRE_DTYPES = ("same", "bf16")
TIER_CHOICES = ("auto", "flat", "two_tier", "three_tier")
UNEVEN_INPUTS = ("stop", "error", "off")
SHARED_MEMORY_CHOICES = ("auto", "off")
START_METHODS = ("popen", "spawn", "fork", "forkserver")

MIB = 1 << 20


def _check_choice(what: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise unknown_option(what, given, allowed)


def _check_range(what: str, given: float, *, low: float, high: float | None = None, unit: str) -> None:
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise ConfigError(f"{what} is a number of {unit}, got {given!r} ({type(given).__name__})")
    if given < low or (high is not None and given > high):
        allowed = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
        raise ConfigError(f"{what}={given:g} {unit}: must be {allowed} {unit}")


@dataclass(frozen=True)
class ProbeConfig:
    """Measuring the links at start-up.

    Attributes:
        enabled: Measure bandwidth and latency of each tier once the groups exist. Off by default.
        budget_s: Longest time the probe may take, in seconds (at most 2).
        cache_dir: Folder in which results are kept, one file a cluster; ``None`` means the user's cache folder.
        refresh: Measure again although the cache has this cluster.
    """

    enabled: bool = False
    budget_s: float = 1.5
    cache_dir: str | None = None
    refresh: bool = False

    def __post_init__(self) -> None:
        _check_range("topology.probe.budget_s", self.budget_s, low=0.1, high=2.0, unit="seconds")


@dataclass(frozen=True)
class TopologyConfig:
    """Who sits where.

    Attributes:
        tiers: ``auto`` (three tiers if switches are known, else two), ``flat`` (every rank its own host: no
            hierarchy), ``two_tier`` (hosts), ``three_tier`` (hosts under switches; ``switches`` is then required).
        host: Name of this process's host; ``None`` means it is discovered.
        hosts: Host name -> its ranks, to state the whole placement by hand; ``None`` means it is discovered.
        switches: Switch name -> its hosts; ``None`` means no third tier is known.
        probe: Whether and how the links are measured.
    """

    tiers: str = "auto"
    host: str | None = None
    hosts: dict[str, list[int]] | None = None
    switches: dict[str, list[str]] | None = None
    probe: ProbeConfig = field(default_factory=ProbeConfig)

    def __post_init__(self) -> None:
        _check_choice("topology.tiers", self.tiers, TIER_CHOICES)
        if self.tiers == "three_tier" and not self.switches:
            raise ConfigError(
                "topology.tiers=three_tier needs topology.switches, a mapping of switch name to its hosts, "
                "e.g. topology.switches={rack1: [a, b], rack2: [c, d]}; write topology.tiers=two_tier without it"
            )


@dataclass(frozen=True)
class SyncConfig:
    """How gradients travel.

    Attributes:
        algorithm: ``flat`` (one all-reduce over the world) or ``hierarchical`` (reduce in the host, all-reduce
            across hosts, gather in the host).
        wire_dtype: What crosses between hosts: ``same`` as the gradient, or ``bf16``. Legs inside a host are exact;
            with ``flat`` there are none, and values are rounded between all ranks of several hosts.
        bucket_bytes: Gradients are grouped into buckets of at most this size, in bytes.
        chunk_bytes: Buckets travel in chunks of at most this size, in bytes, so that the legs of successive chunks
            overlap.
        max_in_flight: Chunks of one group that may be on the network at a time.
        shared_memory: ``auto`` (in-host legs on CPU through shared memory where ranks turn out to share it) or
            ``off``.
        timeout_s: Deadline of each operation between ranks, in seconds.
    """

    algorithm: str = "hierarchical"
    wire_dtype: str = "same"
    bucket_bytes: int = 8 * MIB
    chunk_bytes: int = 2 * MIB
    max_in_flight: int = 4
    shared_memory: str = "auto"
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        _check_choice("sync.algorithm", self.algorithm, SYNC_ALGORITHMS)
        _check_choice("sync.wire_dtype", self.wire_dtype, WIRE_DTYPES)
        _check_choice("sync.shared_memory", self.shared_memory, SHARED_MEMORY_CHOICES)
        _check_range("sync.bucket_bytes", self.bucket_bytes, low=1024, unit="bytes")
        _check_range("sync.chunk_bytes", self.chunk_bytes, low=4096, unit="bytes")
        _check_range("sync.max_in_flight", self.max_in_flight, low=1, high=16, unit="chunks")
        _check_range("sync.timeout_s", self.timeout_s, low=0.1, unit="seconds")


SYNC_PRESETS: dict[str, SyncConfig] = {
    "flat": SyncConfig(algorithm="flat"),
    "hierarchical": SyncConfig(),
    "bf16": SyncConfig(wire_dtype="bf16"),
}


@dataclass(frozen=True)
class TensorConfig:
    """Layers split over the ranks of a host.

    Attributes:
        size: Ranks that share each layer; they must sit on one host. ``None`` means all ranks of a host with
            ``parallel.mode=tensor``, and 1, which splits nothing, with the others.
        plan: What is split: ``auto`` (the ready plan that fits the model), ``gpt``, ``huggingface`` or ``mlp``, or a
            mapping of patterns of module names to styles, e.g. ``{"*.up": column, "*.down": row}``.
        loss_parallel: Logits stay split over the vocabulary in ``training_step``, and cross-entropy is computed on the
            parts; needs a ``head`` in the plan.
    """

    size: int | None = None
    plan: Any = "auto"
    loss_parallel: bool = False

    def __post_init__(self) -> None:
        if self.size is not None:
            _check_range("parallel.tensor.size", self.size, low=1, unit="ranks")
            if self.size != int(self.size):
                raise ConfigError(f"parallel.tensor.size={self.size:g} ranks: must be a whole number")
        if isinstance(self.plan, str):
            _check_choice("parallel.tensor.plan", self.plan, TENSOR_PLANS)
        elif not isinstance(self.plan, Mapping) or not self.plan:
            raise ConfigError(
                f"parallel.tensor.plan={self.plan!r}: must be one of {', '.join(TENSOR_PLANS)}, or a mapping of "
                'patterns of module names to styles, e.g. {"*.up": column, "*.down": row}'
            )


@dataclass(frozen=True)
class ParallelConfig:
    """What becomes of the model.

    Attributes:
        mode: ``ddp`` (each rank holds the whole model, gradients are averaged), ``zero1`` (optimizer state is sharded
            over all ranks, gradients are summed into shards once a step), ``zero2`` (also gradients, after each
            micro-batch), ``zero3`` (also parameters, gathered a block ahead), ``hsdp`` (as ``zero3`` over the ranks of
            a host; each host holds all shards) or ``tensor`` (the ranks of a host share each layer; hosts are
            replicas).
        find_unused_parameters: Look for parameters that took no part in a step; costs a walk of the graph under
            ``ddp``, else a small exchange a step, and in ``zero3`` and ``hsdp`` that parameters are gathered all at
            once.
        static_graph: The same parameters take part in every step, in the same order. Only ``ddp``.
        gradient_as_bucket_view: Gradients are views into the buckets, which saves two copies a step and, without
            accumulation, their size in memory. Set it to false for code that detaches or replaces ``.grad``. Only
            ``ddp``.
        broadcast_buffers: Buffers (BatchNorm statistics) follow rank 0 at each training forward.
        uneven_inputs: What happens when ranks have different numbers of training batches: ``stop`` (all stop at the
            same step, the shortest rank's), ``error`` (a named error on all ranks), ``off`` (not checked; ranks that
            run dry leave the others waiting until the deadline).
        secondary_shard: ``host`` (``zero3`` keeps a second shard over the ranks of each host between forward and
            backward, so that backward gathers inside the host) or ``off``.
        shard_modules: Class names, or patterns of module names such as ``model.blocks.*``, of the modules that are
            sharded as a unit; empty: repeated blocks are found. Only ``zero1`` to ``hsdp``.
        prefetch: Blocks gathered ahead of the one that computes. Only ``zero3`` and ``hsdp``.
        cpu_offload: Shards and optimizer live in host memory. Only GPUs, only ``zero1`` to ``hsdp``.
        gather_dtype: What parameters are gathered and computed in: ``same`` as their own, ``bf16`` or ``fp16``; the
            shards, which the optimizer steps, stay as they are. Only ``zero1`` to ``hsdp``.
        reduce_dtype: What gradients are summed in: ``same`` as their parameter's, ``fp32``, ``bf16`` or ``fp16``. Only
            ``zero1`` to ``hsdp``.
        tensor: Layers split over the ranks of a host: by themselves with ``tensor``, or inside the shards of ``zero1``
            to ``hsdp``.
    """

    mode: str = "ddp"
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    broadcast_buffers: bool = True
    uneven_inputs: str = "stop"
    secondary_shard: str = "off"
    shard_modules: list[str] = field(default_factory=list)
    prefetch: int = 1
    cpu_offload: bool = False
    gather_dtype: str = "same"
    reduce_dtype: str = "same"
    tensor: TensorConfig = field(default_factory=TensorConfig)

    def __post_init__(self) -> None:
        _check_choice("parallel.mode", self.mode, PARALLEL_MODES)
        _check_choice("parallel.uneven_inputs", self.uneven_inputs, UNEVEN_INPUTS)
        _check_choice("parallel.secondary_shard", self.secondary_shard, SECONDARY_SHARDS)
        _check_choice("parallel.gather_dtype", self.gather_dtype, SHARD_DTYPES)
        _check_choice("parallel.reduce_dtype", self.reduce_dtype, SHARD_DTYPES)
        _check_range("parallel.prefetch", self.prefetch, low=1, high=64, unit="blocks")
        if isinstance(self.shard_modules, str) or not all(isinstance(name, str) for name in self.shard_modules):
            raise ConfigError(
                f"parallel.shard_modules={self.shard_modules!r}: must be a list of class names or patterns, "
                "e.g. [Block] or ['model.blocks.*']"
            )
        if self.secondary_shard == "host" and self.mode != "zero3":
            raise CombinationError(
                f"parallel.secondary_shard=host is for parallel.mode=zero3, whose backward gathers over all hosts; "
                f"with parallel.mode={self.mode} write parallel.secondary_shard=off"
            )
        self._check_split()

    def _check_split(self) -> None:
        """Refuse what does not go with split layers."""
        if self.mode == "tensor" and self.tensor.size == 1:
            raise CombinationError(
                "parallel.mode=tensor with parallel.tensor.size=1 splits nothing; write parallel=ddp"
            )
        no_ddp = "DistributedDataParallel does not take split layers; write parallel=tensor"
        no_second = "FSDP2 keeps no second shard of split layers; write parallel.secondary_shard=off, or parallel=hsdp"
        no_offload = "layers are split between devices; write parallel.cpu_offload=false"
        refused = {
            "mode=ddp": (self.mode == "ddp", no_ddp),
            "secondary_shard=host": (self.secondary_shard == "host", no_second),
            "cpu_offload=true": (self.cpu_offload, no_offload),
        }
        for option, (is_set, reason) in refused.items():
            if self.splits and is_set:
                raise CombinationError(f"parallel.{option} with parallel.tensor.size={self.tensor.size}: {reason}")

    @property
    def shards(self) -> bool:
        """Whether parameters, gradients or optimizer state are sharded over the ranks that read different data."""
        return self.mode in SHARDING_MODES

    @property
    def splits(self) -> bool:
        """Whether ranks share layers, and read the same data."""
        return self.mode == "tensor" or (self.tensor.size or 1) > 1


PARALLEL_PRESETS: dict[str, ParallelConfig] = {mode: ParallelConfig(mode=mode) for mode in PARALLEL_MODES}
TOPOLOGY_PRESETS: dict[str, TopologyConfig] = {
    "auto": TopologyConfig(),
    "flat": TopologyConfig(tiers="flat"),
    "two_tier": TopologyConfig(tiers="two_tier"),
}

RECOMPUTE_MODES = ("off", "full", "every_n", "selective", "budget")
BYTE_UNITS = {
    "B": 1,
    "KB": 10**3,
    **{f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate("kMGT", start=1)},
    **{f"{prefix}iB": 2 ** (10 * power) for power, prefix in enumerate("KMGT", start=1)},
}


@dataclass(frozen=True)
class RecomputeConfig:
    """Which blocks keep only their input for the backward pass and run again in it.

    Attributes:
        mode: ``off``, ``full`` (every block), ``every_n`` (each ``every``-th block), ``selective`` (every block, but
            what matrix products, attention and convolutions return is kept), ``budget`` (as few blocks as make the
            activations of all blocks fit into ``budget``; measured in the first backward).
        every: With ``every_n``: of so many blocks one is recomputed, the first of them.
        budget: With ``budget``: bytes a rank may keep for backward, as a number or with a unit (``8GB``, ``512MiB``).
        modules: Class names, or dotted paths in which ``*`` stands for one name (``model.blocks.*``), of the blocks;
            ``None`` means they are found.
    """

    mode: str = "off"
    every: int = 2
    budget: int | str | None = None
    modules: list[str] | None = None

    def __post_init__(self) -> None:
        _check_choice("recompute.mode", self.mode, RECOMPUTE_MODES)
        _check_range("recompute.every", self.every, low=1, unit="blocks")
        if self.every != int(self.every):
            raise ConfigError(f"recompute.every={self.every:g} blocks: must be a whole number")
        if self.budget is not None:
            _check_range("recompute.budget", parse_bytes("recompute.budget", self.budget), low=1024, unit="bytes")
        elif self.mode == "budget":
            raise ConfigError(
                "recompute.mode=budget needs recompute.budget, the bytes a rank may keep for backward, "
                "e.g. recompute.budget=8GB; write recompute=full to recompute every block"
            )
        if self.modules is not None and (isinstance(self.modules, str) or not self.modules):
            raise ConfigError(
                f"recompute.modules is a list of class names or dotted paths such as [Block, model.blocks.*], or null "
                f"to have the blocks found; got {self.modules!r}"
            )

    @property
    def budget_bytes(self) -> int | None:
        """The budget, in bytes."""
        return None if self.budget is None else parse_bytes("recompute.budget", self.budget)


RECOMPUTE_PRESETS: dict[str, RecomputeConfig] = {
    "off": RecomputeConfig(),
    "full": RecomputeConfig(mode="full"),
    "every_n": RecomputeConfig(mode="every_n"),
    "selective": RecomputeConfig(mode="selective"),
}


def parse_bytes(what: str, given: int | str) -> int:
    """Bytes from a whole number, or from a number with a unit.

    Args:
        what: Name of the option, for messages.
        given: E.g. ``8000000000``, ``"8GB"``, ``"1.5 GiB"``.

    Raises:
        ConfigError: It is neither; the message lists the units.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", given) if isinstance(given, str) else None
    if match and (match[2] or "B") in BYTE_UNITS:
        return int(float(match[1]) * BYTE_UNITS[match[2] or "B"])
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    raise ConfigError(
        f"{what}={given!r} is no size: write a whole number of bytes, or a number with one of the units "
        f"{', '.join(BYTE_UNITS)}, e.g. 8GB"
    )


ConfigT = TypeVar("ConfigT")


def resolve(what: str, given: Any, config_type: type[ConfigT], presets: Mapping[str, ConfigT]) -> ConfigT:
    """Turn what a user may write into a config: a preset's name, a mapping of options, or the config itself.

    Args:
        what: Name of the group, for messages, e.g. ``"sync"``.
        given: A preset's name, a mapping (as Hydra hands over), or a ready config.
        config_type: The dataclass wanted.
        presets: Name -> config.

    Raises:
        UnknownOptionError: The name is no preset, or a key is no option.
        ConfigError: The value is of another type, or out of range.
    """
    if isinstance(given, config_type):
        return given
    if isinstance(given, str):
        if given not in presets:
            raise unknown_option(what, given, presets)
        return presets[given]
    if isinstance(given, Mapping):
        return from_mapping(what, given, config_type)
    raise ConfigError(
        f"{what} must be one of {', '.join(presets)}, a mapping of options or a {config_type.__name__}, "
        f"got {type(given).__name__}"
    )


def from_mapping(what: str, values: Mapping[str, Any], config_type: type[ConfigT]) -> ConfigT:
    """Make a config from a mapping; nested mappings become nested configs. Unknown keys are refused."""
    if not dataclasses.is_dataclass(config_type):
        raise TypeError(f"{config_type!r} is not a config")
    fields = {f.name: f for f in dataclasses.fields(config_type)}
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            raise unknown_option(f"option of {what}", key, fields)
        nested = fields[key].default_factory
        if isinstance(nested, type) and dataclasses.is_dataclass(nested) and isinstance(value, Mapping):
            value = from_mapping(f"{what}.{key}", value, nested)
        arguments[key] = value
    try:
        return config_type(**arguments)
    except TypeError as error:
        raise ConfigError(f"{what}: {error}") from error
