"""What a run leaves behind, as values: facts of the run, and of each rank its steps, samples and spans.

Times are seconds and sizes bytes where the name says nothing else. What could not be measured is ``None``, never 0, and
:attr:`RankHeader.unavailable` says why. All mappings are read only by convention.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

VERSION = 1  # of the files; readers read all versions up to theirs


class Phase(str, enum.Enum):
    """What the thread that trains is doing. Each instant of a step belongs to one phase; they add up to the step."""

    DATA_WAIT = "data_wait"  # the loader was asked for a batch and has not given it
    HOST_TO_DEVICE = "host_to_device"  # the batch is moved
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"  # its step, gradient clipping and zeroing
    COMMUNICATION = "communication"  # exposed only: waiting for other ranks, with nothing computed meanwhile
    PIPELINE_IDLE = "pipeline_idle"  # a stage waits for its neighbours
    CHECKPOINT = "checkpoint"  # training stands still for a checkpoint
    VALIDATION = "validation"
    LOGGING = "logging"
    OTHER = "other"  # callbacks, Lightning's own loops, what is not told apart


@dataclass(frozen=True)
class Traffic:
    """What was communicated in a step on one tier, or in all.

    Attributes:
        total_s: Time in which at least one operation was under way: the union of their spans.
        exposed_s: The part of it in which the training thread (or stream) computed nothing.
        size_bytes: Payload of the operations on this rank; ``None``: unknown.
        operations: How many.
    """

    total_s: float
    exposed_s: float
    size_bytes: int | None = None
    operations: int = 0

    @property
    def overlapped_s(self) -> float:
        """The part hidden behind compute."""
        return self.total_s - self.exposed_s


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step of one rank, from the end of the step before to its own end.

    Attributes:
        step: Number of optimizer steps before it.
        rank: Global rank.
        start_ns: Of this rank's monotonic clock; :meth:`RankHeader.wall_ns` makes it comparable.
        duration_s: How long.
        phases: Seconds of each phase; those that are known add up to ``duration_s``. ``None``: not told apart.
        communication: Of all tiers together; its exposed part is ``phases[COMMUNICATION]`` (in a pipeline, where
            waiting for a neighbour is ``PIPELINE_IDLE``, of all but the stages' exchange). ``None``: unavailable.
        tiers: The same for each tier, by its name (``"host"``, ``"cross"``, ...); they may overlap each other.
        micro_batches: Batches read for it.
        samples: In them, on this rank; ``None``: unknown.
        tokens: Likewise.
        batch_bytes: Bytes of the batches' tensors.
        counters: What the counters of the event stream gained, by name (``"data.shared_bytes"``, ...).
    """

    step: int
    rank: int
    start_ns: int
    duration_s: float
    phases: Mapping[Phase, float | None]
    communication: Traffic | None = None
    tiers: Mapping[str, Traffic] = field(default_factory=dict)
    micro_batches: int = 1
    samples: int | None = None
    tokens: int | None = None
    batch_bytes: int | None = None
    counters: Mapping[str, float] = field(default_factory=dict)

    @property
    def end_ns(self) -> int:
        """When it ended, on the same clock as ``start_ns``."""
        return self.start_ns + round(self.duration_s * 1e9)


class Span(NamedTuple):
    """A stretch of a step's timeline, for pictures.

    Attributes:
        step: The step it was seen in.
        lane: Its row: ``"main"`` or the name of a lane.
        name: A phase's name on ``"main"``, else the event's.
        start_ns: Of this rank's monotonic clock.
        end_ns: Likewise.
    """

    step: int
    lane: str
    name: str
    start_ns: int
    end_ns: int


class Sample(NamedTuple):
    """One value of a metric.

    Attributes:
        metric: A name of :data:`METRICS`.
        step: The step in which it was taken.
        wall_ns: When, as ``time.time_ns`` says.
        value: In the metric's unit.
    """

    metric: str
    step: int
    wall_ns: int
    value: float


@dataclass(frozen=True)
class Metric:
    """What a metric is.

    Attributes:
        unit: Of its values: ``"s"``, ``"bytes"``, ``"1"`` (a share), ``"1/s"``, ``"W"``, ``"C"``.
        title: For people.
        of_host: Whether it is the host's: its ranks would all say the same, and one of them does.
        number: Its place among the six, from 1; 0 for the others.
    """

    unit: str
    title: str
    of_host: bool = False
    number: int = 0


METRICS: Mapping[str, Metric] = {
    "data_wait": Metric("s", "Data wait per step", number=1),
    "gpu_utilisation": Metric("1", "GPU utilisation", number=2),
    "cpu_utilisation": Metric("1", "CPU utilisation of the rank, of one core", number=2),
    "communication_share": Metric("1", "Communication, share of the step", number=3),
    "exposed_communication_share": Metric("1", "Exposed communication, share of the step"),
    "tcp_retransmits": Metric("1/s", "TCP retransmits per second", of_host=True, number=4),
    "tcp_retransmits_per_step": Metric("1", "TCP retransmits per step", of_host=True),
    "tcp_sent_segments": Metric("1/s", "TCP segments sent per second", of_host=True),
    "rdma_retransmits": Metric("1/s", "RDMA retransmits per second", of_host=True),
    "rdma_sent": Metric("bytes/s", "Sent by RDMA", of_host=True),
    "rdma_received": Metric("bytes/s", "Received by RDMA", of_host=True),
    "checkpoint_stall": Metric("s", "Checkpoint: training stands still", number=5),
    "checkpoint_write": Metric("s", "Checkpoint: until it is committed", number=5),
    "heartbeat_timeouts": Metric("1", "Heartbeat timeouts since the start", number=6),
    "network_sent": Metric("bytes/s", "Sent over the network", of_host=True),
    "network_received": Metric("bytes/s", "Received over the network", of_host=True),
    "read_bytes": Metric("bytes/s", "Read by the rank and its workers, from disk, cache of the system or network"),
    "memory": Metric("bytes", "Memory of the rank"),
    "gpu_memory": Metric("bytes", "GPU memory in use"),
    "gpu_power": Metric("W", "GPU power"),
    "gpu_temperature": Metric("C", "GPU temperature"),
}


@dataclass(frozen=True)
class RankHeader:
    """Who wrote a file.

    Attributes:
        rank: Global rank.
        local_rank: Rank in its host.
        host: Its host, as the topology names it.
        device: ``"cpu"`` or e.g. ``"cuda:0 NVIDIA H100"``.
        pid: Its process.
        started_wall_ns: ``time.time_ns`` at the start.
        started_ns: ``time.monotonic_ns`` at the same moment.
        unavailable: What cannot be measured here and why: the names of phases and metrics, ``"communication"``.
        facts: What this rank alone knows (its loader's sampler, its data set's length and bytes, ...).
    """

    rank: int
    local_rank: int
    host: str
    device: str
    pid: int
    started_wall_ns: int
    started_ns: int
    unavailable: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def wall_ns(self, monotonic_ns: int) -> int:
        """A moment of this rank's monotonic clock as the time of day."""
        return self.started_wall_ns + monotonic_ns - self.started_ns


@dataclass(frozen=True)
class RunFacts:
    """What is the same for all ranks.

    Attributes:
        run_id: Unique.
        started: ISO 8601, with the offset.
        world_size: Ranks.
        strategy: The strategy's name, e.g. ``"hierdist zero2"`` or ``"DDPStrategy"``.
        options: The configuration, flat: ``{"parallel.mode": "zero2", ...}``; no secrets.
        config_hash: Of ``options``.
        commit: Of the user's repository; ``None``: none.
        versions: Of Python, torch, lightning, lightning_dist.
        peak_flops: Floating point operations a second that a rank's device can do at most; ``None``: unknown.
        flops_per_sample: Of the model, forward and backward; ``None``: unknown.
        run: What a launcher calls the run, the same however often it starts the ranks; empty: no launcher says.
        round: How many times it has started them, from 1.
        record: Folder in which the launcher's agents write down incidents; ``None``: there is none.
    """

    run_id: str
    started: str
    world_size: int
    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    config_hash: str = ""
    commit: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    peak_flops: float | None = None
    flops_per_sample: float | None = None
    run: str = ""
    round: int = 1
    record: str | None = None


@dataclass(frozen=True)
class RankRecord:
    """What one rank has seen; steps and samples are in order of time."""

    header: RankHeader
    steps: tuple[StepRecord, ...] = ()
    samples: tuple[Sample, ...] = ()
    spans: tuple[Span, ...] = ()  # of some steps only: files would grow without bound

    def series(self, metric: str) -> tuple[Sample, ...]:
        """The samples of one metric."""
        return tuple(sample for sample in self.samples if sample.metric == metric)


@dataclass(frozen=True)
class RunRecord:
    """A whole run, merged from its files.

    Attributes:
        facts: Of the run.
        ranks: By global rank; one whose file is missing or torn at its head is not there.
        problems: What could not be read, a sentence each.
    """

    facts: RunFacts
    ranks: Mapping[int, RankRecord]
    problems: tuple[str, ...] = ()
