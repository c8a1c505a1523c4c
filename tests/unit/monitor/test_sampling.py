"""The thread that samples, what it makes of steps, and when it warns."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from lightning_dist.errors import ConfigError
from lightning_dist.events import EventStream
from lightning_dist.monitor.alarms import WINDOW, Alarms
from lightning_dist.monitor.cluster import ClusterWatch, WatchSettings
from lightning_dist.monitor.record import METRICS, Phase, RankHeader, Sample, StepRecord, Traffic
from lightning_dist.monitor.sampling.opening import open_sources
from lightning_dist.monitor.sampling.sampler import FINE, Sampler
from lightning_dist.monitor.sampling.source import Reading, Source
from lightning_dist.monitor.step_series import CheckpointWriteSource, StepSource, mean_readings

DEADLINE_S = 30.0


class Counting:
    """A source that counts how often it is read."""

    metrics = ("memory",)

    def __init__(self, *, is_fine: bool = False, enough: int = 5, fails_at: Callable[[int], bool] = bool) -> None:
        self.is_fine = is_fine
        self.reads = 0
        self.closed = 0
        self.has_enough = threading.Event()
        self._enough = enough
        self._fails_at = fails_at

    def read(self, now_ns: int) -> Iterable[Reading]:
        self.reads += 1
        if self.reads >= self._enough:
            self.has_enough.set()
        if self._fails_at(self.reads):
            raise OSError("as planned")
        return [Reading("memory", self.reads)]

    def close(self) -> None:
        self.closed += 1


def never(number: int) -> bool:
    return False


def sampler(sources: dict[str, Source], *listeners: Callable[[Sample], None], interval_s: float = 0.01) -> Any:
    said: list[str] = []
    return Sampler(sources, listeners, interval_s=interval_s, steps=lambda: 3, say=said.append), said


def test_it_reads_until_it_is_closed_and_once_more_then() -> None:
    source, taken = Counting(fails_at=never), list[Sample]()
    running, said = sampler({"x": source}, taken.append)
    assert source.has_enough.wait(DEADLINE_S)
    running.close()
    running.close()
    assert source.closed == 1
    assert [sample.value for sample in taken] == list(range(1, source.reads + 1))
    assert {sample.step for sample in taken} == {3}
    assert said == []


def test_fine_sources_are_read_several_times_an_interval() -> None:
    fine, coarse = Counting(is_fine=True, enough=3 * FINE, fails_at=never), Counting(fails_at=never)
    running, _ = sampler({"fine": fine, "coarse": coarse}, interval_s=0.2)
    assert fine.has_enough.wait(DEADLINE_S)
    running.close()
    assert coarse.reads - 2 <= fine.reads / FINE <= coarse.reads


def test_a_short_interval_is_not_divided() -> None:
    fine, coarse = Counting(is_fine=True, fails_at=never), Counting(fails_at=never)
    running, _ = sampler({"fine": fine, "coarse": coarse}, interval_s=0.01)
    assert fine.has_enough.wait(DEADLINE_S)
    running.close()
    assert fine.reads == coarse.reads


def test_a_source_that_fails_is_said_once_and_asked_again() -> None:
    failing, sound = Counting(fails_at=lambda number: number < 4), Counting(fails_at=never)
    taken = list[Sample]()
    running, said = sampler({"failing": failing, "sound": sound}, taken.append)
    assert failing.has_enough.wait(DEADLINE_S)
    running.close()
    assert said == ["reading failing failed: OSError: as planned; training goes on"]
    assert failing.closed == sound.closed == 1
    assert sound.reads >= 5
    assert 4 in [sample.value for sample in taken]


def test_a_listener_that_fails_does_not_keep_samples_from_the_others() -> None:
    source, taken = Counting(fails_at=never), list[Sample]()

    def fail(sample: Sample) -> None:
        raise ValueError("as planned")

    running, said = sampler({"x": source}, fail, taken.append)
    assert source.has_enough.wait(DEADLINE_S)
    running.close()
    assert len(said) == 1
    assert len(taken) == source.reads


def test_a_source_that_does_not_come_back_holds_nobody() -> None:
    let_go = threading.Event()

    class Hanging(Counting):
        def read(self, now_ns: int) -> Iterable[Reading]:
            super().read(now_ns)
            let_go.wait(DEADLINE_S)
            return []

    source = Hanging(enough=1, fails_at=never)
    running, _ = sampler({"x": source})
    assert source.has_enough.wait(DEADLINE_S)
    running.close(wait_s=0.01)
    assert source.closed == 0
    let_go.set()
    running.close(wait_s=DEADLINE_S)
    assert source.closed == 1


def test_long_runs_are_looked_at_less_often() -> None:
    running, _ = sampler({}, interval_s=1.0)
    running.close()
    ticks_of_two_hours = 7200 * FINE
    intervals_s = [running._tick_s(number * ticks_of_two_hours) * FINE for number in range(8)]
    assert intervals_s == [1, 2, 4, 8, 16, 32, 32, 32]
    slow, _ = sampler({}, interval_s=60.0)
    slow.close()
    assert slow._tick_s(10**9) * FINE == 60.0


def test_what_this_machine_has_is_read_and_what_it_lacks_says_why() -> None:
    opened = open_sources(torch.device("cpu"), steps=lambda: 0, reads_host=True)
    metrics = {metric for source in opened.sources.values() for metric in source.metrics}
    assert metrics >= {"cpu_utilisation", "memory", "read_bytes", "tcp_retransmits", "network_sent"}
    assert "no GPU" in opened.unavailable["gpu_power"]
    assert metrics.isdisjoint(opened.unavailable)
    assert metrics | set(opened.unavailable) <= set(METRICS)
    for source in opened.sources.values():
        source.close()


def test_only_one_rank_reads_what_is_the_hosts() -> None:
    opened = open_sources(torch.device("cpu"), steps=lambda: 0, reads_host=False)
    metrics = {metric for source in opened.sources.values() for metric in source.metrics} | set(opened.unavailable)
    assert not any(METRICS[metric].of_host for metric in metrics)


# -- steps -------------------------------------------------------------------------------------------------------------


def record(step: int, duration_s: float = 1.0, *, stall_s: float = 0.0, total_s: float | None = 0.5) -> StepRecord:
    return StepRecord(
        step=step,
        rank=0,
        start_ns=step * 10**9,
        duration_s=duration_s,
        phases={Phase.DATA_WAIT: 0.1 * (step + 1), Phase.CHECKPOINT: stall_s},
        communication=None if total_s is None else Traffic(total_s, total_s / 2),
    )


def test_shares_are_of_the_time_and_not_of_the_number_of_steps() -> None:
    readings = mean_readings([record(0, 1.0, total_s=0.5), record(1, 3.0, total_s=0.5)])
    assert {reading.metric: reading.value for reading in readings} == {
        "data_wait": pytest.approx(0.15),
        "communication_share": 0.25,
        "exposed_communication_share": 0.125,
    }


def test_what_is_not_known_of_steps_is_left_out() -> None:
    assert [reading.metric for reading in mean_readings([record(0, total_s=None)])] == ["data_wait"]
    unknown = StepRecord(0, 0, 0, 1.0, {Phase.DATA_WAIT: None}, None)
    assert mean_readings([unknown]) == []
    assert mean_readings([]) == []


@pytest.mark.parametrize("writes_at_once", [True, False])
def test_a_checkpoint_is_a_reading_of_its_own_step(writes_at_once: bool) -> None:
    source = StepSource(writes_at_once=writes_at_once)
    for step in range(4):
        source.take(record(step, stall_s=0.7 if step == 2 else 0.0))
    found = [r for r in source.read(5 * 10**9) if r.metric.startswith("checkpoint")]
    expected = ["checkpoint_stall", "checkpoint_write"] if writes_at_once else ["checkpoint_stall"]
    assert [(r.metric, r.value, r.step) for r in found] == [(metric, 0.7, 2) for metric in expected]
    assert source.read(6 * 10**9) == []


def test_writes_in_the_background_are_read_from_the_stream() -> None:
    events = EventStream()
    source = CheckpointWriteSource("checkpoint write", steps=lambda: 9)
    events.add_sink(source.take)
    events.span("checkpoint write", 1 * 10**9, end_ns=3 * 10**9)
    events.span("checkpoint copy", 1 * 10**9, end_ns=3 * 10**9)
    (reading,) = source.read(4 * 10**9)
    assert (reading.metric, reading.value, reading.step) == ("checkpoint_write", 2.0, 9)
    assert source.read(5 * 10**9) == []


# -- warnings ----------------------------------------------------------------------------------------------------------


def told(alarms: Alarms, **series: list[float]) -> list[str]:
    rows = zip(*series.values(), strict=True)
    given = [
        alarms.take(Sample(metric, 0, 0, value)) for row in rows for metric, value in zip(series, row, strict=True)
    ]
    return [text for text in given if text is not None]


def test_much_communication_is_said_once() -> None:
    (text,) = told(Alarms("a"), communication_share=[0.35] * 5 * WINDOW)
    assert "35% of the step" in text


def test_a_short_burst_of_communication_is_not_said() -> None:
    assert told(Alarms("a"), communication_share=[0.2] * WINDOW + [0.9] + [0.2] * WINDOW) == []
    assert told(Alarms("a"), communication_share=[0.9] * (WINDOW - 1)) == []


def test_retransmits_are_said_by_their_share_with_the_host() -> None:
    (text,) = told(Alarms("node7"), tcp_sent_segments=[980.0] * 2 * WINDOW, tcp_retransmits=[20.0] * 2 * WINDOW)
    assert text.startswith("host node7 sends 2.0% of its TCP segments again, 20 a second")


@pytest.mark.parametrize(("sent", "again"), [(1e6, 100.0), (0.5, 0.5), (0.0, 0.0)], ids=["few", "idle", "silent"])
def test_few_retransmits_are_not_said(sent: float, again: float) -> None:
    assert told(Alarms("a"), tcp_sent_segments=[sent] * 2 * WINDOW, tcp_retransmits=[again] * 2 * WINDOW) == []


# -- all of it ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"interval_s": 0}, "interval_s=0: write a number of seconds"),
        ({"heartbeat_s": float("inf")}, "heartbeat_s=inf"),
        ({"interval_s": "1s"}, "interval_s='1s'"),
        ({"heartbeat_s": 2.0, "heartbeat_timeout_s": 5.0}, "write at least 6"),
    ],
)
def test_times_that_are_none_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        WatchSettings(**options)


def test_memory_does_not_grow_with_samples_and_steps(tmp_path: Any) -> None:
    """5,000 samples and as many steps: what is kept between two looks is let go."""
    said: list[str] = []
    watch = ClusterWatch(
        tmp_path,
        RankHeader(0, 0, "a", "cpu", 1, 0, 0),
        WatchSettings(interval_s=0.01),
        device=torch.device("cpu"),
        steps=lambda: 1,
        store=None,
        world_size=1,
        checkpoint_event="checkpoint write",
        writes_at_once=True,
        say=said.append,
    )
    count, enough = [0], threading.Event()
    sizes: list[int] = []

    def measure(sample: Sample) -> None:
        count[0] += 1
        watch.take_step(record(count[0]))
        if count[0] in (1000, 5000):
            sizes.append(tracemalloc.get_traced_memory()[0])
        if count[0] >= 5000:
            enough.set()

    tracemalloc.start()
    try:
        watch.on_sample(measure)
        assert enough.wait(100)
    finally:
        tracemalloc.stop()
        watch.close()
    assert not [text for text in said if "goes on" in text]  # alarms may sound: the machine is real
    assert sizes[1] - sizes[0] < 200_000  # 4,000 samples and steps would be ten times as much
    assert len((tmp_path / "samples-00000.jsonl").read_text().splitlines()) > 5000
