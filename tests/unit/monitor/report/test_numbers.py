"""What the report computes before it draws: thinned curves, rows, shares, throughput, quantities; pure."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.monitor.record import Phase, RankRecord, RunRecord, Span, StepRecord
from lightning_dist.monitor.report.breakdown import apart, breakdown, breakdowns, settled
from lightning_dist.monitor.report.course import course
from lightning_dist.monitor.report.extremes import keep_extremes, spread_evenly, stretches_of
from lightning_dist.monitor.report.quantities import COUNT, SHARE, form_of, text
from lightning_dist.monitor.report.rows import rows_of
from lightning_dist.monitor.report.throughput import throughput
from tests.support import reported

CURVES = st.lists(st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf), max_size=300)


@given(values=CURVES, at_most=st.integers(4, 60))
def test_a_thinned_curve_keeps_its_extremes_and_ends(values: list[float], at_most: int) -> None:
    kept = keep_extremes(values, at_most)
    finite = [index for index, value in enumerate(values) if math.isfinite(value)]
    assert kept == sorted(set(kept))
    assert set(kept) <= set(finite)
    assert len(kept) <= at_most
    if finite:
        shown = [values[index] for index in kept]
        assert (min(shown), max(shown)) == (min(values[i] for i in finite), max(values[i] for i in finite))
        assert (kept[0], kept[-1]) == (finite[0], finite[-1])
    if len(finite) <= at_most:
        assert kept == finite


def test_a_single_peak_among_many_values_stays() -> None:
    values = [1.0] * 5000
    values[3217] = 9.0
    assert 3217 in keep_extremes(values, 40)


def test_a_curve_of_fewer_than_four_points_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 4 points are needed for a curve, got 3"):
        keep_extremes([1.0], 3)


@given(count=st.integers(0, 500), at_most=st.integers(1, 60))
def test_stretches_cover_everything_once(count: int, at_most: int) -> None:
    stretches = stretches_of(count, at_most)
    assert [index for first, end in stretches for index in range(first, end)] == list(range(count))
    assert len(stretches) == min(count, at_most)
    lengths = [end - first for first, end in stretches]
    assert not lengths or max(lengths) - min(lengths) <= 1


def test_things_spread_evenly_begin_and_end_with_the_ends() -> None:
    assert spread_evenly(5, 9) == [0, 1, 2, 3, 4]
    assert spread_evenly(101, 3) == [0, 50, 100]
    assert spread_evenly(7, 1) == [0]


@given(spans=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30))
def test_rows_hold_all_spans_and_none_on_top_of_another(spans: list[tuple[int, int]]) -> None:
    given_spans = [Span(0, "comm", "op", start, start + length) for start, length in spans]
    rows = rows_of(given_spans)
    assert sorted(span for row in rows for span in row) == sorted(given_spans)
    for row in rows:
        assert all(before.end_ns <= after.start_ns for before, after in pairwise(row))


def test_operations_under_way_together_lie_below_each_other() -> None:
    first, second, third = (Span(0, "comm", "op", start, start + 10) for start in (0, 5, 10))
    assert rows_of([third, second, first]) == [[first, third], [second]]


@pytest.mark.parametrize(
    ("value", "form", "said"),
    [
        (0.0, "s", "0 s"),
        (4.5e-5, "s", "45.0 µs"),
        (0.0123, "s", "12.3 ms"),
        (0.99999, "s", "1.00 s"),
        (12.34, "s", "12.3 s"),
        (182.0, "s", "3 min 2 s"),
        (7260.0, "s", "2 h 1 min"),
        (0.41, SHARE, "41 %"),
        (0.062, SHARE, "6.2 %"),
        (0.0001, SHARE, "< 0.1 %"),
        (0.0, SHARE, "0 %"),
        (12, COUNT, "12"),
        (2027.4, COUNT, "2,027"),
        (3.2e9, COUNT, "3.20 G"),
        (27e6, "bytes", "27.0 MB"),
        (1.25e8, "bytes/s", "125 MB/s"),
        (2.5, "1/s", "2.50 /s"),
        (71.0, "C", "71.0 °C"),
        (None, "s", "unavailable"),
        (math.nan, "bytes", "unavailable"),
    ],
)
def test_quantities(value: float | None, form: str, said: str) -> None:
    assert text(value, form) == said


def test_a_metric_without_a_unit_is_a_share_or_a_count() -> None:
    assert form_of("communication_share", "1") == SHARE
    assert form_of("cpu_utilisation", "1") == SHARE
    assert form_of("heartbeat_timeouts", "1") == COUNT
    assert form_of("memory", "bytes") == "bytes"


def test_the_mean_step_is_that_of_the_settled_steps() -> None:
    rank = reported.run(ranks=1, steps=30).ranks[0]
    slow_start = dataclasses.replace(rank.steps[0], duration_s=99.0)
    mean = breakdown(dataclasses.replace(rank, steps=(slow_start, *rank.steps[1:])))
    assert mean is not None
    assert len(settled(rank.steps)) == mean.steps == 25
    assert mean.step_s == pytest.approx(sum(step.duration_s for step in rank.steps[5:]) / 25)
    assert sum(seconds or 0.0 for seconds in mean.phases.values()) == pytest.approx(mean.step_s)
    assert mean.phases[Phase.PIPELINE_IDLE] is None, "what is not known is not 0"
    assert mean.share(Phase.PIPELINE_IDLE) is None
    assert mean.communication is not None
    assert mean.communication.exposed_s + mean.communication.overlapped_s == pytest.approx(mean.communication.total_s)


def test_of_many_ranks_the_marked_and_the_extreme_ones_are_shown() -> None:
    ranks = breakdowns(reported.run(ranks=40, steps=40, spans=False, samples=False, slow_rank=17))
    shown = [rank.header.rank for rank in apart(ranks, at_most=20, always=[33, 999])]
    assert len(shown) == 20
    assert shown == sorted(shown)
    assert {33, 17} <= set(shown), "33 is marked, and 17 spends most in forward"
    waits = {rank.header.rank: rank.phases[Phase.DATA_WAIT] or 0.0 for rank in ranks}
    assert {max(waits, key=waits.__getitem__), min(waits, key=waits.__getitem__)} <= set(shown)
    assert apart(ranks, at_most=40) == ranks


def test_throughput_is_of_all_ranks() -> None:
    record = reported.run(ranks=2, steps=20, slow_rank=None)
    settled_s = [sum(step.duration_s for step in settled(rank.steps)) for rank in record.ranks.values()]
    expected = sum(16 * 16 / seconds for seconds in settled_s)
    found = throughput(record)
    assert found.samples_per_s == pytest.approx(expected)
    assert found.tokens_per_s == pytest.approx(256 * expected)
    assert found.bytes_per_s == pytest.approx(4096 * expected)
    assert found.mfu == pytest.approx(expected * 2e8 / (1e12 * 2))


def test_ranks_that_read_the_same_samples_count_once() -> None:
    record = reported.run(ranks=4, steps=20, slow_rank=None)
    pipelines = {
        number: dataclasses.replace(
            rank, header=dataclasses.replace(rank.header, facts={"data_parallel_rank": number // 2})
        )
        for number, rank in record.ranks.items()
    }
    whole, shared = throughput(record), throughput(dataclasses.replace(record, ranks=pipelines))
    assert whole.samples_per_s is not None
    assert shared.samples_per_s == pytest.approx(whole.samples_per_s / 2, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"peak_flops": None}, "the peak of the device is not known"),
        ({"flops_per_sample": None}, "the floating point operations of the model are not known"),
    ],
)
def test_why_there_is_no_mfu(changes: dict[str, None], why: str) -> None:
    record = reported.run(ranks=1, steps=10)
    found = throughput(dataclasses.replace(record, facts=dataclasses.replace(record.facts, **changes)))
    assert (found.mfu, found.why_no_mfu) == (None, why)


def test_uncounted_samples_are_unknown() -> None:
    record = reported.run(ranks=2, steps=10)
    steps = tuple(dataclasses.replace(step, samples=None) for step in record.ranks[1].steps)
    ranks = {**record.ranks, 1: dataclasses.replace(record.ranks[1], steps=steps)}
    found = throughput(dataclasses.replace(record, ranks=ranks))
    assert found.samples_per_s is None
    assert found.tokens_per_s is not None
    assert found.why_no_mfu == "samples were not counted"


def test_the_course_of_a_run_adds_up_to_its_steps() -> None:
    record = reported.run(ranks=3, steps=700, spans=False, samples=False)
    stretches = course(record)
    assert len(stretches) == 300
    assert [stretch.first for stretch in stretches[1:]] == [stretch.last + 1 for stretch in stretches[:-1]]
    total_s = sum(
        sum(stretch.phases.values()) * (stretch.last - stretch.first + 1) * len(record.ranks) for stretch in stretches
    )
    steps: list[StepRecord] = [step for rank in record.ranks.values() for step in rank.steps]
    assert total_s == pytest.approx(sum(step.duration_s for step in steps))
    assert Phase.PIPELINE_IDLE not in stretches[0].phases


def test_a_run_without_steps_has_no_course_and_no_mean() -> None:
    record = reported.run(ranks=1, steps=1)
    empty = RunRecord(record.facts, {0: RankRecord(record.ranks[0].header)})
    assert course(empty) == []
    assert breakdowns(empty) == []
    assert throughput(empty).step_s is None
