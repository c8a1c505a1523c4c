"""Every option of the library: its meaning, unit, default and validation.

The dataclasses are the schema of the Hydra groups in ``conf/`` and the arguments behind
:class:`~lightning_dist.strategy.HierDistStrategy`. They hold plain values only (no torch), are frozen, and check
themselves when made, so that a bad value is refused before any process starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lightning_dist.errors import ConfigError, unknown_option

PARALLEL_MODES = ("ddp",)
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
class ParallelConfig:
    """What becomes of the model.

    Attributes:
        mode: ``ddp``: each rank holds the whole model, gradients are averaged.
        find_unused_parameters: Look for parameters that took no part in a step; costs a walk of the graph.
        static_graph: The same parameters take part in every step, in the same order.
        gradient_as_bucket_view: Gradients are views into the buckets, which saves their size in memory and two copies
            a step. Set it to false for code that detaches or replaces ``.grad``.
        broadcast_buffers: Buffers (BatchNorm statistics) follow rank 0 at each training forward.
        uneven_inputs: What happens when ranks have different numbers of training batches: ``stop`` (all stop at the
            same step, the shortest rank's), ``error`` (a named error on all ranks), ``off`` (not checked; ranks that
            run dry leave the others waiting until the deadline).
    """

    mode: str = "ddp"
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    broadcast_buffers: bool = True
    uneven_inputs: str = "stop"

    def __post_init__(self) -> None:
        _check_choice("parallel.mode", self.mode, PARALLEL_MODES)
        _check_choice("parallel.uneven_inputs", self.uneven_inputs, UNEVEN_INPUTS)


PARALLEL_PRESETS: dict[str, ParallelConfig] = {"ddp": ParallelConfig()}
TOPOLOGY_PRESETS: dict[str, TopologyConfig] = {
    "auto": TopologyConfig(),
    "flat": TopologyConfig(tiers="flat"),
    "two_tier": TopologyConfig(tiers="two_tier"),
}

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
