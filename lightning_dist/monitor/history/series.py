"""The values of a run by metric, one a step or second, over all its ranks."""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from lightning_dist.monitor.record import METRICS, Phase, RankRecord, RunRecord, Sample, StepRecord

_WARM_UP_STEPS = 10  # of a long run; the first steps allocate, compile and fill queues


class Better(str, enum.Enum):
    """Which way a metric is to go."""

    LOWER = "lower"
    HIGHER = "higher"
    NEITHER = "neither"  # it says what was done, not how well


@dataclass(frozen=True)
class Kind:
    """What a metric of the history is.

    Attributes:
        unit: Of its values.
        title: For people.
        better: Which way it is to go.
        is_bursty: Whether it comes in bursts, as what is logged each fiftieth step does, and most of its values may be
            0: means tell what medians do not.
    """

    unit: str
    title: str
    better: Better = Better.LOWER
    is_bursty: bool = False


_BURSTY_PHASES = (Phase.CHECKPOINT, Phase.VALIDATION, Phase.DATA_WAIT, Phase.LOGGING, Phase.OTHER)
_HIGHER_IS_BETTER = ("gpu_utilisation",)
_NEITHER = (
    *("cpu_utilisation", "network_sent", "network_received", "read_bytes", "tcp_sent_segments"),
    *("gpu_power", "gpu_temperature"),
)
_BURSTY = ("tcp_retransmits", "tcp_retransmits_per_step", "rdma_retransmits", "checkpoint_stall")
_COUNTERS = {"heartbeat_timeouts": "Heartbeat timeouts per second"}  # since the start; here, a second


def _kinds() -> dict[str, Kind]:
    kinds = {
        "step": Kind("s", "Step"),
        "samples_per_s": Kind("1/s", "Samples per second, all ranks", Better.HIGHER),
        "tokens_per_s": Kind("1/s", "Tokens per second, all ranks", Better.HIGHER),
        "communication": Kind("s", "Communication per step"),
        "communication_share": Kind("1", METRICS["communication_share"].title),
        "exposed_communication_share": Kind("1", METRICS["exposed_communication_share"].title),
    }
    for phase in Phase:
        title = f"{phase.value.replace('_', ' ').capitalize()} per step"
        kinds[_phase_metric(phase)] = Kind("s", title, is_bursty=phase in _BURSTY_PHASES)
    kinds.update((name, Kind("1/s", title, is_bursty=True)) for name, title in _COUNTERS.items())
    for name, metric in METRICS.items():
        way = Better.HIGHER if name in _HIGHER_IS_BETTER else Better.NEITHER if name in _NEITHER else Better.LOWER
        kinds.setdefault(name, Kind(metric.unit, metric.title, way, is_bursty=name in _BURSTY))
    return kinds


def _phase_metric(phase: Phase) -> str:
    return "data_wait" if phase is Phase.DATA_WAIT else f"phase.{phase.value}"


KINDS: Mapping[str, Kind] = _kinds()


def run_series(record: RunRecord) -> dict[str, tuple[float, ...]]:
    """The values of each metric that the run has, in order of time, its first steps left out.

    A step's value is the mean over the ranks that have it; throughput is that of all ranks together. Samples are
    averaged over ranks second by second.
    """
    series = _of_steps(record.ranks.values())
    for name, values in _of_samples(record.ranks.values()).items():
        series.setdefault(name, values)
    return {name: values for name, values in series.items() if values}


def warm_up(count: int) -> int:
    """How many of so many steps are left out at the beginning."""
    return min(_WARM_UP_STEPS, count // 10)


def _of_steps(ranks: Iterable[RankRecord]) -> dict[str, tuple[float, ...]]:
    with_steps = [rank for rank in ranks if rank.steps]
    by_step: dict[int, list[StepRecord]] = defaultdict(list)
    for rank in with_steps:
        # The later one where a number occurs twice, as after a resume.
        for number, step in {step.step: step for step in rank.steps}.items():
            by_step[number].append(step)
    numbers = sorted(step for step, records in by_step.items() if len(records) == len(with_steps))
    numbers = numbers[warm_up(len(numbers)) :]
    reading = _reading(with_steps)
    series: dict[str, tuple[float, ...]] = {}
    for name, value_of in _step_values(reading).items():
        values = [value_of(by_step[number]) for number in numbers]
        if all(value is not None and math.isfinite(value) for value in values):
            series[name] = tuple(value for value in values if value is not None)
    return series


def _of_samples(ranks: Iterable[RankRecord]) -> dict[str, tuple[float, ...]]:
    seconds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for rank in ranks:
        for sample in _without_counters(rank.samples):
            if math.isfinite(sample.value):
                seconds[sample.metric][sample.wall_ns // 10**9].append(sample.value)
    return {
        name: tuple(sum(values) / len(values) for _, values in sorted(of_second.items()))
        for name, of_second in seconds.items()
        if name in KINDS
    }


def _without_counters(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Counters as what they gain a second: their mean would say how long a run went on, and when they rose."""
    before: dict[str, Sample] = {}
    for sample in samples:
        if sample.metric not in _COUNTERS:
            yield sample
            continue
        last = before.get(sample.metric, sample)
        before[sample.metric] = sample
        if sample.wall_ns > last.wall_ns:
            gained = max(sample.value - last.value, 0.0)
            yield sample._replace(value=gained * 1e9 / (sample.wall_ns - last.wall_ns))


_StepValue = Callable[[list[StepRecord]], "float | None"]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _duration(steps: list[StepRecord]) -> float | None:
    return _mean(step.duration_s for step in steps)


def _reading(ranks: Iterable[RankRecord]) -> frozenset[int]:
    """One rank of those that read the same samples: of a pipeline's stages, or of a tensor group."""
    first: dict[str, int] = {}
    for rank in ranks:
        first.setdefault(str(rank.header.facts.get("data_parallel_rank", f"rank {rank.header.rank}")), rank.header.rank)
    return frozenset(first.values())


def _rate(amount_of: Callable[[StepRecord], int | None], reading: frozenset[int]) -> _StepValue:
    def rate(steps: list[StepRecord]) -> float | None:
        amounts, seconds = [amount_of(step) for step in steps if step.rank in reading], _duration(steps)
        known = [amount for amount in amounts if amount is not None]
        return sum(known) / seconds if seconds and len(known) == len(amounts) else None

    return rate


def _phase(phase: Phase) -> _StepValue:
    return lambda steps: _mean(step.phases.get(phase) for step in steps)


def _share(seconds_of: Callable[[StepRecord], float | None]) -> _StepValue:
    def share(steps: list[StepRecord]) -> float | None:
        seconds, whole = _mean(seconds_of(step) for step in steps), _duration(steps)
        return None if seconds is None or not whole else seconds / whole

    return share


def _communication_s(step: StepRecord) -> float | None:
    return None if step.communication is None else step.communication.total_s


def _exposed_s(step: StepRecord) -> float | None:
    return None if step.communication is None else step.communication.exposed_s


def _step_values(reading: frozenset[int]) -> Mapping[str, _StepValue]:
    return {
        "step": _duration,
        "samples_per_s": _rate(lambda step: step.samples, reading),
        "tokens_per_s": _rate(lambda step: step.tokens, reading),
        **{_phase_metric(phase): _phase(phase) for phase in Phase},
        "communication": lambda steps: _mean(_communication_s(step) for step in steps),
        "communication_share": _share(_communication_s),
        "exposed_communication_share": _share(_exposed_s),
    }
