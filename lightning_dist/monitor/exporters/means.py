"""What a logger gets: the means of an interval's steps and samples."""

from __future__ import annotations

import math
import threading
from collections import defaultdict

from lightning_dist.monitor.record import Phase, Sample, StepRecord

PREFIX = "monitor/"
_PER_STEP = ("data_wait", "communication_share", "exposed_communication_share")  # samples that steps say already


class IntervalMeans:
    """Adds up steps and samples until they are taken. Any thread may hand it some.

    The names of means are those of phases and of :data:`~lightning_dist.monitor.record.METRICS`, after ``monitor/``;
    besides, ``monitor/step`` (seconds), ``monitor/samples_per_s`` and ``monitor/tokens_per_s`` of this rank, and
    the shares of communication.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clear()

    def step(self, record: StepRecord) -> None:
        """Add a step."""
        with self._lock:
            self._steps += 1
            self._seconds += record.duration_s
            for phase, seconds in record.phases.items():
                if seconds is not None:
                    known = self._phases[phase]
                    known[0] += 1
                    known[1] += seconds
            for name in ("samples", "tokens"):
                amount = getattr(record, name)
                self._amounts[name] += math.nan if amount is None else amount
            traffic = record.communication
            if traffic is not None:
                self._known_traffic_s += record.duration_s
                self._traffic_s["communication_share"] += traffic.total_s
                self._traffic_s["exposed_communication_share"] += traffic.exposed_s

    def sample(self, sample: Sample) -> None:
        """Add a sample."""
        if sample.metric in _PER_STEP or not math.isfinite(sample.value):
            return
        with self._lock:
            total = self._samples[sample.metric]
            total[0] += 1
            total[1] += sample.value

    def take(self) -> dict[str, float]:
        """The means since the last call; those of nothing are left out."""
        with self._lock:
            means = {name: total / count for name, (count, total) in self._samples.items()}
            if self._steps and self._seconds > 0:
                means["step"] = self._seconds / self._steps
                means.update((phase.value, seconds / count) for phase, (count, seconds) in self._phases.items())
                rates = {f"{name}_per_s": amount / self._seconds for name, amount in self._amounts.items()}
                means.update((name, rate) for name, rate in rates.items() if math.isfinite(rate))
                if self._known_traffic_s > 0:
                    means.update((name, seconds / self._known_traffic_s) for name, seconds in self._traffic_s.items())
            self._clear()
        return {f"{PREFIX}{name}": mean for name, mean in sorted(means.items())}

    def _clear(self) -> None:
        self._steps = 0
        self._seconds = 0.0
        self._known_traffic_s = 0.0  # of steps whose communication is known
        self._phases: dict[Phase, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._amounts: dict[str, float] = defaultdict(float)
        self._traffic_s: dict[str, float] = defaultdict(float)
        self._samples: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
