"""What the rules look at, computed once from a record: pure.

Besides steps and samples these facts are read, all of them optional:

- of a rank (:attr:`RankHeader.facts`): ``loader`` and ``sampler`` (class names), ``is_sharded`` (whether ranks read
  different samples), ``dataset_length`` (samples of the whole set), ``dataset_bytes``, ``samples_per_epoch`` (of this
  rank), ``workers`` and ``pin_memory`` (of the loader), ``data_parallel_rank`` (ranks that share a model share it),
  ``threads``, ``cpu_cores``, ``interface`` (that the user has named), ``link_bytes_per_s`` (nominal rate of the host's
  fastest link);
- of the run (:attr:`RunFacts.options`): ``parallel.mode``, ``parallel.pipeline.*`` and ``parallel.tensor.size``,
  ``sync.*``, ``ddp.bucket_cap_mb`` and ``.comm_hook``, ``data.*``, ``checkpoint.mode``, ``.snapshot`` and ``.every``,
  ``trainer.accumulate_grad_batches``, ``.precision``, ``.log_every_n_steps``, ``.enable_progress_bar`` and
  ``.use_distributed_sampler``, ``optimizer.fused``, ``model.is_compiled``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from lightning_dist.monitor.diagnosis.stragglers import Stragglers, stragglers_of
from lightning_dist.monitor.diagnosis.window import Floats, TrafficTable, Window
from lightning_dist.monitor.diagnosis.wording import figures, percent
from lightning_dist.monitor.record import Phase, RunRecord, Sample
from lightning_dist.topology.hierarchy import PlacementCost, placement_cost
from lightning_dist.topology.spec import Cluster

SHARDED_MODES = ("zero1", "zero2", "zero3", "hsdp")
RESENT_PER_S = 1.0  # fewer are accidents of a connection that opens or closes


@dataclass(frozen=True, eq=False)
class Evidence:
    """A window of steps, and what was sampled meanwhile."""

    record: RunRecord
    window: Window

    # Where the time goes.

    def cost_s(self, *phases: Phase) -> Floats:
        """What these phases took together in each step, along the path; unmeasured ones count as nothing."""
        cost = np.zeros_like(self.window.step_s)
        for phase in phases:
            if phase in self.window.path:
                cost = cost + self.window.path[phase]
        return cost

    def without_stragglers_s(self, *phases: Phase) -> Floats:
        """The same, as if stragglers were as fast as the others."""
        cost = self.cost_s(*phases)
        found = self.stragglers
        if found is None or found.phase not in phases:
            return cost
        theirs = np.isin(self.window.pace, found.rows)
        return np.maximum(cost - np.where(theirs, found.cost_s, 0.0), 0.0)

    @cached_property
    def stragglers(self) -> Stragglers | None:
        """Ranks that the others wait for."""
        return stragglers_of(self.window)

    # The run.

    @property
    def is_ours(self) -> bool:
        """Whether a strategy of this library trained."""
        return self.record.facts.strategy.lower().startswith("hierdist")

    @property
    def on_gpus(self) -> bool:
        """Whether ranks compute on CUDA devices."""
        return any(record.header.device.startswith("cuda") for record in self.record.ranks.values())

    @property
    def world_size(self) -> int:
        """All ranks, also those that left no record."""
        return max(self.record.facts.world_size, len(self.record.ranks))

    @property
    def readers(self) -> int | None:
        """Ranks that read different samples: all but those that share a model; ``None``: unknown."""
        replicas = self.facts("data_parallel_rank")
        if len(replicas) == self.world_size:
            return len(set(map(str, replicas)))
        sharing = 1
        for axis in ("tensor", "pipeline"):
            size = self.whole_option(f"parallel.{axis}.size")
            if size is None and self.option("parallel.mode") == axis:
                return None
            sharing *= size or 1
        return max(self.world_size // sharing, 1)

    @cached_property
    def has_several_hosts(self) -> bool:
        """Whether anything crosses a network."""
        return len({record.header.host for record in self.record.ranks.values()}) > 1

    def option(self, name: str) -> Any:
        """An option of the run; ``None``: unknown."""
        return self.record.facts.options.get(name)

    def whole_option(self, name: str) -> int | None:
        """An option that is a positive whole number."""
        value = self.option(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    @property
    def more_accumulation(self) -> str:
        """How to synchronise and to step a quarter as often as now."""
        return f"Trainer(accumulate_grad_batches={4 * (self.whole_option('trainer.accumulate_grad_batches') or 1)})"

    def facts(self, name: str) -> list[Any]:
        """What the ranks say of something, for those that do."""
        found = (record.header.facts.get(name) for record in self.record.ranks.values())
        return [value for value in found if value is not None]

    def numbers(self, name: str) -> list[float]:
        """The same, where it is a positive number."""
        return [float(value) for value in self.facts(name) if _is_positive(value)]

    @cached_property
    def placement(self) -> PlacementCost | None:
        """How the ring of all ranks, in their order, leaves hosts; ``None``: some host is unknown, or only one."""
        ranks = self.record.ranks
        if set(ranks) != set(range(self.world_size)):
            return None
        hosts = tuple(ranks[rank].header.host for rank in sorted(ranks))
        if not all(hosts) or len(set(hosts)) < 2:
            return None
        return placement_cost(Cluster(hosts))

    # What was sampled.

    @cached_property
    def _samples(self) -> Mapping[str, Mapping[int, list[Sample]]]:
        """By metric and rank, those of the window."""
        first, last = self.window.steps[0], self.window.steps[-1]
        found: dict[str, dict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))
        for rank, record in self.record.ranks.items():
            for sample in record.samples:
                if first <= sample.step <= last and math.isfinite(sample.value):
                    found[sample.metric][rank].append(sample)
        return found

    def mean_by_rank(self, metric: str) -> dict[int, float]:
        """Mean of a metric for each rank that sampled it."""
        series = self._samples.get(metric, {})
        return {rank: sum(sample.value for sample in samples) / len(samples) for rank, samples in series.items()}

    def mean(self, metric: str) -> float | None:
        """Mean over ranks, or over hosts for a metric of hosts."""
        means = self.mean_by_rank(metric)
        return sum(means.values()) / len(means) if means else None

    def curves(self, metric: str) -> list[tuple[Floats, Floats]]:
        """Seconds of the day and values of a metric, for each rank that sampled it."""
        return [
            (np.array([sample.wall_ns / 1e9 for sample in samples]), np.array([sample.value for sample in samples]))
            for samples in self._samples.get(metric, {}).values()
        ]

    @cached_property
    def heartbeat_timeouts(self) -> dict[int, int]:
        """How often each rank's heartbeat was late, by the rank that counted; only those with any."""
        series = self._samples.get("heartbeat_timeouts", {})
        gained = {
            rank: round(max(sample.value for sample in samples) - min(sample.value for sample in samples))
            for rank, samples in series.items()
        }
        return {rank: count for rank, count in gained.items() if count > 0}

    @cached_property
    def resent(self) -> Resent | None:
        """What the host that sends the largest share of its TCP segments again does; ``None``: not sampled.

        A host that sends hardly any is behind all others, whatever its share.
        """
        again, sent = self.mean_by_rank("tcp_retransmits"), self.mean_by_rank("tcp_sent_segments")
        found = [
            Resent(again[rank] / sent[rank], again[rank], self.record.ranks[rank].header.host)
            for rank in again
            if sent.get(rank, 0.0) > 0
        ]
        return max(found, key=lambda each: (each.per_s >= RESENT_PER_S, each.share), default=None)

    # Data.

    @cached_property
    def read_amplification(self) -> float | None:
        """Bytes that all ranks read, over the bytes of the batches that they were given; ``None``: unknown."""
        rates = self.mean_by_rank("read_bytes")
        rows = [row for row, rank in enumerate(self.window.ranks) if rank in rates]
        if not rows:
            return None
        used = self.window.batch_bytes[rows]
        if not np.isfinite(used).all() or used.sum() <= 0:
            return None
        elapsed_s = self.window.duration_s[rows].sum(axis=1)
        read = sum(rates[self.window.ranks[row]] * float(s) for row, s in zip(rows, elapsed_s, strict=True))
        return read / float(used.sum())

    # Communication.

    @cached_property
    def traffic(self) -> Traffic | None:
        """What is communicated in a step; ``None``: not measured."""
        table = self.window.communication
        return None if table is None else Traffic.of(table, self.window)

    @cached_property
    def link_rate(self) -> float | None:
        """Bytes a second that the busiest host sends while something is communicated; ``None``: unknown."""
        if self.traffic is None or self.traffic.total_s <= 0:
            return None
        rates = self.mean_by_rank("network_sent")
        if not rates:
            return None
        busy = self.traffic.total_s / float(self.window.step_s.mean())
        return max(rates.values()) / min(max(busy, 1e-9), 1.0)


class Resent(NamedTuple):
    """TCP segments that a host sends again.

    Attributes:
        share: Of those it sends.
        per_s: How many a second.
        host: Which.
    """

    share: float
    per_s: float
    host: str

    @property
    def sentence(self) -> str:
        """For people."""
        return (
            f"Host {self.host} sends {percent(self.share)} of its TCP segments again, {figures(self.per_s)} a second."
        )


@dataclass(frozen=True)
class Traffic:
    """Communication of a step along the path, on average.

    Attributes:
        total_s: Time in which something was under way.
        overlapped_s: The part hidden behind compute.
        size_bytes: Payload of a rank; ``None``: unknown.
        operations: How many.
    """

    total_s: float
    overlapped_s: float
    size_bytes: float | None
    operations: float

    @staticmethod
    def of(table: TrafficTable, window: Window) -> Traffic:
        """The averages of a table."""
        total = window.along(np.nan_to_num(table.total_s, nan=0.0))
        exposed = window.along(np.nan_to_num(table.exposed_s, nan=0.0))
        sizes = table.size_bytes[np.isfinite(table.size_bytes)]
        operations = table.operations[np.isfinite(table.operations)]
        return Traffic(
            total_s=float(total.mean()),
            overlapped_s=float(np.maximum(total - exposed, 0.0).mean()),
            size_bytes=float(sizes.mean()) if sizes.size else None,
            operations=float(operations.mean()) if operations.size else 0.0,
        )

    @property
    def bytes_per_operation(self) -> float | None:
        """Payload of an operation on average."""
        return self.size_bytes / self.operations if self.size_bytes and self.operations > 0 else None


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
