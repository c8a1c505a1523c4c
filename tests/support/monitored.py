"""Records of runs that never ran: a small model of how ranks spend a step, with causes put in.

In a step each rank reads, computes and steps its optimizer for times that vary; all then wait for the slowest, and for
the communication that backward does not hide. So ranks take equally long, and what one is slower by the others wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_dist.monitor.record import Phase, RankHeader, RankRecord, RunRecord, Sample, StepRecord
from tests.support.records import STARTED_NS, made_facts, made_header, step_of

TWO_HOSTS = ("a", "a", "b", "b")
CYCLIC = ("a", "b", "a", "b")
MB = 1_000_000
_CLOCKS_APART_NS = 1_000_000_007  # of monotonic clocks, from rank to rank


@dataclass(frozen=True)
class Slow:
    """Ranks that take longer.

    Attributes:
        ranks: Which.
        phase: In what.
        extra_s: By how much, a step.
        since: From this step on.
    """

    ranks: tuple[int, ...]
    extra_s: float
    phase: Phase = Phase.FORWARD
    since: int = 0


@dataclass(frozen=True)
class Model:
    """How a run behaves; the defaults are those of a healthy one of 40 ms a step.

    Attributes:
        hosts: Of each rank.
        steps: How many.
        seed: Of the noise.
        noise: Standard deviation of each time, as a share of it.
        times_s: Of each phase that a rank spends itself.
        communication_s: What the bytes take, if ranks start at once.
        hidden_s: What backward hides of it.
        operations: A step.
        size_bytes: A step.
        slower_from: Step from which on communication takes ``slower`` times as long.
        slower: How much.
        idle_s: In a pipeline, waiting for neighbours.
        slow: Ranks that take longer.
        checkpoint_every: Steps; 0: never.
        checkpoint_s: Each.
        resent: Of the segments sent, what is sent again, by host.
        sent_bytes_per_s: Of each host, over the network.
        read_factor: Bytes read over bytes used.
        metrics: Further samples: the same value, or a series, on each rank.
        facts: Of each rank.
        options: Of the run.
        strategy: Of the run.
        unavailable: Phases that are not told apart, and why; another phase has their time.
    """

    hosts: Sequence[str] = TWO_HOSTS
    steps: int = 100
    seed: int = 0
    noise: float = 0.05
    times_s: Mapping[Phase, float] = field(default_factory=dict)
    communication_s: float = 0.008
    hidden_s: float = 0.006
    operations: int = 4
    size_bytes: int = 20 * MB
    slower_from: int = 0
    slower: float = 1.0
    idle_s: float = 0.0
    slow: tuple[Slow, ...] = ()
    checkpoint_every: int = 0
    checkpoint_s: float = 0.0
    resent: Mapping[str, float] = field(default_factory=dict)
    sent_bytes_per_s: float = 500.0 * MB
    read_factor: float = 1.0
    metrics: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    strategy: str = "DDPStrategy"
    unavailable: Mapping[Phase, str] = field(default_factory=dict)

    def record(self) -> RunRecord:
        """What it leaves behind."""
        ranks = {rank: RankRecord(self._header(rank)) for rank in range(len(self.hosts))}
        tables, ends = self._tables()
        for rank, empty in ranks.items():
            steps = tuple(self._step(rank, step, tables, ends) for step in range(self.steps))
            ranks[rank] = RankRecord(empty.header, steps, self._samples(rank, steps))
        return RunRecord(made_facts(len(self.hosts), strategy=self.strategy, options=self.options), ranks)

    def _tables(self) -> tuple[dict[Phase, np.ndarray], np.ndarray]:
        """Seconds of each rank and step, and how long steps take."""
        times_s = {
            Phase.DATA_WAIT: 0.0005,
            Phase.HOST_TO_DEVICE: 0.0001,
            Phase.FORWARD: 0.011,
            Phase.BACKWARD: 0.022,
            Phase.OPTIMIZER: 0.002,
            Phase.LOGGING: 0.0003,
            Phase.OTHER: 0.001,
            Phase.CHECKPOINT: 0.0,
            Phase.VALIDATION: 0.0,
            **self.times_s,
        }
        random = np.random.default_rng(self.seed)
        shape = (len(self.hosts), self.steps)
        tables = {
            phase: np.maximum(seconds * (1 + self.noise * random.standard_normal(shape)), 0.0)
            for phase, seconds in times_s.items()
        }
        for slow in self.slow:
            tables[slow.phase][list(slow.ranks), slow.since :] += slow.extra_s
        if self.checkpoint_every:
            tables[Phase.CHECKPOINT][0, self.checkpoint_every :: self.checkpoint_every] += self.checkpoint_s
        own = sum(tables.values(), start=np.zeros(shape))
        taken = np.full(self.steps, self.communication_s) * (1 + self.noise * random.standard_normal(self.steps))
        taken[self.slower_from :] *= self.slower
        exposed = np.maximum(taken - self.hidden_s, 0.0)
        idle = np.full(self.steps, self.idle_s)
        ends = own.max(axis=0) + exposed + idle
        tables[Phase.PIPELINE_IDLE] = np.broadcast_to(idle, shape)
        tables[Phase.COMMUNICATION] = ends - own - idle
        return tables, ends

    def _step(self, rank: int, step: int, tables: Mapping[Phase, np.ndarray], ends: np.ndarray) -> StepRecord:
        phases: dict[Phase, float | None] = {phase: float(table[rank, step]) for phase, table in tables.items()}
        for phase in self.unavailable:
            # A backward waits for what is communicated in it; the rest is among what is left.
            merged = Phase.BACKWARD if phase is Phase.COMMUNICATION else Phase.OTHER
            phases[merged] = (phases[merged] or 0.0) + (phases[phase] or 0.0)
            phases[phase] = None
        return step_of(
            step,
            phases,
            rank=rank,
            start_ns=_CLOCKS_APART_NS * rank + round(float(ends[:step].sum()) * 1e9),
            duration_s=float(ends[step]),
            hidden_s=self.hidden_s,
            size_bytes=self.size_bytes,
            operations=self.operations,
            batch_bytes=1 * MB,
        )

    def _samples(self, rank: int, steps: Sequence[StepRecord]) -> tuple[Sample, ...]:
        """One of each metric every few steps, as if a second had gone by."""
        mean_s = sum(step.duration_s for step in steps) / max(len(steps), 1)
        first_of_host = self.hosts.index(self.hosts[rank]) == rank
        values: dict[str, float | Sequence[float]] = {
            "read_bytes": self.read_factor * MB / mean_s if mean_s else 0.0,
            "heartbeat_timeouts": 0.0,
        }
        if first_of_host:
            values["network_sent"] = self.sent_bytes_per_s
            values["tcp_sent_segments"] = 10_000.0
            values["tcp_retransmits"] = 10_000.0 * self.resent.get(self.hosts[rank], 0.0)
        values.update(self.metrics)
        found = []
        for number, step in enumerate(steps[::4]):
            wall_ns = STARTED_NS + number * 10**9
            for metric, value in values.items():
                now = value if isinstance(value, (int, float)) else value[number % len(value)]
                found.append(Sample(metric, step.step, wall_ns, float(now)))
        return tuple(found)

    def _header(self, rank: int) -> RankHeader:
        return made_header(
            rank,
            self.hosts,
            started_wall_ns=STARTED_NS + 5_000_000 * rank,
            started_ns=_CLOCKS_APART_NS * rank,
            unavailable={phase.value: why for phase, why in self.unavailable.items()},
            facts=self.facts,
        )
