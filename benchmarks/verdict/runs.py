"""What is run, as values: a training run in all its details, and a case, which is a run with known causes in it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

WORLD_SIZE = 4  # two ranks on each of two hosts
BLOCKS = 4
STAGE_BLOCKS = BLOCKS // WORLD_SIZE  # of a stage, in a pipeline


class Injected(str, enum.Enum):
    """What was put into a run to make it slow."""

    SLOW_STORAGE = "slow storage"  # each read takes long; each rank reads its own samples
    N_FOLD_READS = "n-fold reads"  # each rank reads the samples of all
    SLOW_LINK = "slow link"  # of one host
    PLACEMENT = "cyclic placement"  # neighbours in the ring sit on different hosts
    NO_OVERLAP = "no overlap"  # all gradients in one bucket, which is full when backward ends
    SMALL_BUCKETS = "small buckets"  # each gradient on its own
    SLOW_RANK = "slow rank"  # its compute takes longer
    CHECKPOINTS = "long checkpoints"
    LOSSY_LINK = "lossy link"  # of one host: its queue is short, so that the kernel drops and sends again
    BUBBLE = "pipeline bubble"  # few micro-batches
    HOST_WORK = "host work"  # in the optimizer or a callback, on all ranks


class Reads(str, enum.Enum):
    """Which samples a rank reads."""

    OWN = "own"  # those of its batches: a sampler deals them
    ALL = "all"  # those of all ranks' batches, of which it keeps its own: a stream that is not sharded
    SAME = "same"  # the same as every other rank: no sampler deals them


@dataclass(frozen=True)
class Link:
    """How a host's link is shaped.

    Attributes:
        rate_mbit: In either direction, in Mbit/s; ``None``: unshaped.
        queue_bytes: What may wait for its turn before the kernel drops; ``None``: what passes in 200 ms.
    """

    rate_mbit: float | None = None
    queue_bytes: int | None = None


@dataclass(frozen=True)
class Run:
    """A training run. Its compute is sleep, which takes no core; all else is real.

    Attributes:
        seed: Of its noise.
        strategy: ``"ddp"`` (Lightning's), ``"hierdist"``, ``"zero2"`` or ``"pipeline"``.
        steps: How many.
        compute_s: Of a step on one rank, a third of it in the forward.
        jitter: Relative standard deviation of compute, each step and rank on its own.
        width: Of a layer.
        layers: Of a block.
        batch_size: Samples a rank, of each batch.
        sample_bytes: Of a sample in the store.
        bucket_bytes: Gradients that travel together; ``None``: the strategy's default.
        is_cyclic: Ranks are numbered in turn over hosts.
        links: Host -> how its link is shaped; those not in it are not.
        read_s_per_byte: What the store takes.
        read_jitter: Relative standard deviation of it.
        reads: Which samples a rank reads.
        slow_rank: Whose compute takes longer; ``None``: none's.
        slowdown: By how much, relative to ``compute_s``.
        save_every: Steps from a checkpoint to the next; 0: none.
        save_s: What the store takes for a checkpoint.
        optimizer_s: Work of the host in each step of the optimizer.
        callback_s: Likewise in a callback, after each batch.
        micro_batches: Of a step in a pipeline.
    """

    seed: int
    strategy: str
    steps: int
    compute_s: float
    jitter: float
    width: int
    layers: int
    batch_size: int
    sample_bytes: int
    bucket_bytes: int | None = None
    is_cyclic: bool = False
    links: Mapping[str, Link] = field(default_factory=dict)
    read_s_per_byte: float = 0.0
    read_jitter: float = 0.0
    reads: Reads = Reads.OWN
    slow_rank: int | None = None
    slowdown: float = 0.0
    save_every: int = 0
    save_s: float = 0.0
    optimizer_s: float = 0.0
    callback_s: float = 0.0
    micro_batches: int = 1

    @property
    def gradient_bytes(self) -> int:
        """Of the whole model, in fp32."""
        return BLOCKS * self.layers * self.width * self.width * 4

    @property
    def backward_s(self) -> float:
        """The part of compute behind which gradients can travel."""
        return self.compute_s * 2 / 3

    @property
    def placement(self) -> dict[str, list[int]]:
        """Host -> its ranks."""
        return {"a": [0, 2], "b": [1, 3]} if self.is_cyclic else {"a": [0, 1], "b": [2, 3]}


@dataclass(frozen=True)
class Case:
    """A run whose causes are known.

    Attributes:
        seed: It is all drawn from it.
        run: What is run and judged.
        without: Cause -> the same run without it, to see what the cause costs. A bubble has none: see
            :mod:`benchmarks.verdict.truth`.
    """

    seed: int
    run: Run
    without: Mapping[Injected, Run | None]

    @property
    def causes(self) -> tuple[Injected, ...]:
        """What was put in; nothing: healthy."""
        return tuple(self.without)
