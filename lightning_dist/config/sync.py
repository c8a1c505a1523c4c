"""How gradients travel."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_dist.config.checks import MIB, check_choice, check_count, check_flags, check_range
from lightning_dist.config.local_sgd import LocalSGDConfig
from lightning_dist.config.parameter_server import ParameterServerConfig
from lightning_dist.config.powersgd import PowerSGDConfig
from lightning_dist.config.sparse import SparseConfig
from lightning_dist.errors import CombinationError

SYNC_ALGORITHMS = ("flat", "hierarchical", "powersgd", "local_sgd")
CODECS = ("same", "bf16", "int8", "onebit", "topk")
ROUNDINGS = ("nearest", "stochastic")
GATHERS = ("same", "int8")
SHARED_MEMORY_CHOICES = ("auto", "off")


@dataclass(frozen=True)
class SyncConfig:
    """How gradients travel.

    Attributes:
        algorithm: ``flat`` (one all-reduce over the world), ``hierarchical`` (reduce in the host, all-reduce across
            hosts, gather in the host), ``powersgd`` (matrices as products of two thin ones, which travel so; with
            ``parallel=ddp``, ``zero1``, ``zero2``, ``zero3`` and ``hsdp``) or ``local_sgd`` (hosts train
            apart and average how far they have gone now and then).
        codec: What crosses between hosts: ``same`` as the gradient, ``bf16`` (2 bytes a value), ``int8`` (1 byte, in
            steps of the largest of 256 values), ``onebit`` (signs and the mean magnitude of 256 values) or ``topk``
            (the largest values only). Legs inside a host are exact; with ``flat`` there are none, and values are
            encoded between all ranks of several hosts.
        everywhere: Whether what ranks of one host send each other is encoded, too. It then travels by the backend, also
            where they share memory: for hosts inside which links are slow.
        rounding: Of ``int8``: to the ``nearest`` step, or ``stochastic``, which is right on average.
        ratio: Of ``topk``: the share of values that go, in (0, 0.5).
        momentum_correction: Of ``topk``: momentum that each host takes of its gradients before anything is left out, in
            [0, 1), in place of the optimizer's, which must have none then. 0: none. It takes the memory of fp32
            gradients once more a host.
        error_feedback: Whether what ``int8``, ``onebit``, ``topk`` and ``powersgd`` lose of a gradient is added to what
            is sent next. It takes the memory of fp32 gradients once a host (``powersgd``: with ``ddp``
            a rank), and once more over all ranks.
        warmup_steps: So many synchronisations are exact before the first in which something is lost.
        gathers: How parameters of ``zero1``, ``zero2`` and ``zero3`` cross between hosts: ``same`` as they are, or
            ``int8``. Each rank keeps its shard, and steps it, exact.
        bucket_bytes: Gradients are grouped into buckets of at most this size, in bytes.
        chunk_bytes: Buckets travel in chunks of at most this size, in bytes, so that the legs of successive chunks
            overlap. Encoded ones grow up to ``bucket_bytes`` while what each rank gets of a chunk is below 64 KiB.
        max_in_flight: Chunks of one group that may be on the network at a time.
        shared_memory: ``auto`` (in-host legs on CPU through shared memory where ranks turn out to share it) or
            ``off``.
        timeout_s: Deadline of each operation between ranks, in seconds.
        powersgd: Of ``algorithm=powersgd``.
        local_sgd: Of ``algorithm=local_sgd``; ``codec`` and what belongs to it are then of what hosts average.
        sparse: What becomes of the gradients of embeddings with ``sparse=True``.
        parameter_server: Of tables that ``sparse.exchange`` deals to servers.
    """

    algorithm: str = "hierarchical"
    codec: str = "same"
    everywhere: bool = False
    rounding: str = "nearest"
    ratio: float = 0.01
    momentum_correction: float = 0.0
    error_feedback: bool = True
    warmup_steps: int = 0
    gathers: str = "same"
    bucket_bytes: int = 8 * MIB
    chunk_bytes: int = 2 * MIB
    max_in_flight: int = 4
    shared_memory: str = "auto"
    timeout_s: float = 600.0
    powersgd: PowerSGDConfig = field(default_factory=PowerSGDConfig)
    local_sgd: LocalSGDConfig = field(default_factory=LocalSGDConfig)
    sparse: SparseConfig = field(default_factory=SparseConfig)
    parameter_server: ParameterServerConfig = field(default_factory=ParameterServerConfig)

    def __post_init__(self) -> None:
        check_choice("sync.algorithm", self.algorithm, SYNC_ALGORITHMS)
        check_choice("sync.codec", self.codec, CODECS)
        check_choice("sync.rounding", self.rounding, ROUNDINGS)
        check_range("sync.ratio", self.ratio, low=1e-6, high=0.499, unit="of all values")
        check_range("sync.momentum_correction", self.momentum_correction, low=0, high=0.999, unit="of the velocity")
        check_choice("sync.gathers", self.gathers, GATHERS)
        check_flags("sync", self)
        check_count("sync.warmup_steps", self.warmup_steps, low=0, unit="synchronisations")
        check_choice("sync.shared_memory", self.shared_memory, SHARED_MEMORY_CHOICES)
        check_range("sync.bucket_bytes", self.bucket_bytes, low=1024, unit="bytes")
        check_range("sync.chunk_bytes", self.chunk_bytes, low=4096, unit="bytes")
        check_range("sync.max_in_flight", self.max_in_flight, low=1, high=16, unit="chunks")
        if self.algorithm == "powersgd" and self.codec != "same":
            raise CombinationError(
                f"sync.codec={self.codec} with sync.algorithm=powersgd: what crosses is small already, and is exact; "
                f"write sync.codec=same, or sync={self.codec} without powersgd"
            )
        if self.algorithm == "local_sgd":
            self._check_local_sgd()
        if self.momentum_correction and self.everywhere:
            raise CombinationError(
                "sync.momentum_correction with sync.everywhere=true: momentum is of what a host sends to others; write "
                "sync.everywhere=false, or leave momentum to the optimizer"
            )
        if self.momentum_correction and not self.error_feedback:
            raise CombinationError(
                "sync.momentum_correction with sync.error_feedback=false: what momentum is for is what is sent later; "
                "write sync.error_feedback=true"
            )
        check_range("sync.timeout_s", self.timeout_s, low=0.1, unit="seconds")

    def _check_local_sgd(self) -> None:
        if self.everywhere:
            raise CombinationError(
                "sync.everywhere=true with sync.algorithm=local_sgd: gradients are averaged inside hosts, each step "
                "and exact; write sync.everywhere=false"
            )
        if self.momentum_correction:
            raise CombinationError(
                "sync.momentum_correction with sync.algorithm=local_sgd: it is of gradients, and what hosts average "
                "has momentum by sync.local_sgd.outer_momentum; write sync.momentum_correction=0"
            )
        if self.sparse.exchange != "rows":
            raise CombinationError(
                f"sync.sparse.exchange={self.sparse.exchange} with sync.algorithm=local_sgd: served rows are the same "
                "for all ranks, and hosts train apart; write sync.sparse.exchange=rows, or sync=hierarchical"
            )


SYNC_PRESETS: dict[str, SyncConfig] = {
    "flat": SyncConfig(algorithm="flat"),
    "hierarchical": SyncConfig(),
    "bf16": SyncConfig(codec="bf16"),
    "int8": SyncConfig(codec="int8"),
    "onebit": SyncConfig(codec="onebit", warmup_steps=100),
    "topk": SyncConfig(codec="topk"),
    "powersgd": SyncConfig(algorithm="powersgd"),
    "local_sgd": SyncConfig(algorithm="local_sgd"),
    "auto": SyncConfig(sparse=SparseConfig(exchange="auto")),
    "parameter_server": SyncConfig(sparse=SparseConfig(exchange="parameter_server")),
}
