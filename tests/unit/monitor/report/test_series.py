"""The curves of a report, and which steps it can show."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_dist.monitor.record import Phase, RankRecord, RunRecord, Span
from lightning_dist.monitor.report import shown as shown_module
from lightning_dist.monitor.report.breakdown import breakdowns
from lightning_dist.monitor.report.series import ALL_POINTS, POINTS, STRETCHES, Series, all_series
from lightning_dist.monitor.report.shown import Shown, average, steps_of
from tests.support import reported


def series_of(record: RunRecord) -> dict[str, Series]:
    return {series.metric: series for series in all_series(record, shown_ranks=sorted(record.ranks))}


def test_each_of_the_six_metrics_is_there_measured_or_with_the_reason() -> None:
    found = series_of(reported.run())
    assert {series.number for series in found.values()} >= {1, 2, 3, 4, 5, 6}
    assert found["cpu_utilisation"].lines
    assert "gpu_utilisation" not in found, "CPU utilisation stands for it"
    assert found["communication_share"].limit == 0.3


def test_without_samples_the_steps_say_what_they_can() -> None:
    found = series_of(reported.run(samples=False))
    assert found["data_wait"].of_steps
    assert found["data_wait"].median == pytest.approx(0.006, rel=0.2)
    assert found["checkpoint_stall"].most == pytest.approx(0.12)
    assert found["gpu_utilisation"].why == "no GPU"
    assert found["tcp_retransmits"].why == "not sampled; ClusterMonitor() among the callbacks samples it"
    assert not found["tcp_retransmits"].lines
    assert found["tcp_retransmits"].median is None, "not 0"
    assert [series.number for series in found.values()].count(2) == 1


def test_communication_that_cannot_be_measured_is_unavailable_for_its_reason() -> None:
    record = reported.run(samples=False, unavailable={"communication": "the strategy is not one of ours"})
    ranks = {
        number: dataclasses.replace(
            rank, steps=tuple(dataclasses.replace(step, communication=None) for step in rank.steps)
        )
        for number, rank in record.ranks.items()
    }
    found = series_of(dataclasses.replace(record, ranks=ranks))["communication_share"]
    assert found.why == "the strategy is not one of ours"


def test_lines_are_thinned_and_keep_the_largest_value() -> None:
    record = reported.run(ranks=2, steps=2000, spans=False, samples=False)
    found = series_of(record)["step_time"]
    assert all(len(line.points) <= POINTS for line in found.lines)
    for line in found.lines:
        assert max(point.value for point in line.points) == max(
            step.duration_s for step in record.ranks[line.rank].steps
        )
        assert [point.at_s for point in line.points] == sorted(point.at_s for point in line.points)


def test_over_many_ranks_a_band_holds_the_values_of_all() -> None:
    record = reported.run(ranks=20, steps=300, spans=False, samples=False)
    found = series_of(record)["step_time"]
    assert len(found.band) == STRETCHES
    durations = [step.duration_s for rank in record.ranks.values() for step in rank.steps]
    assert min(stretch.low for stretch in found.band) == min(durations)
    assert max(stretch.high for stretch in found.band) == max(durations)
    assert all(stretch.low <= stretch.middle <= stretch.high for stretch in found.band)
    assert sum(len(line.points) for line in found.lines) <= ALL_POINTS
    assert not series_of(reported.run(ranks=3, steps=30))["step_time"].band


def test_the_average_has_a_row_of_phases_and_one_a_tier() -> None:
    record = reported.run(ranks=2)
    shown = average(breakdowns(record))
    assert [(row.rank, row.lane) for row in shown.rows if row.rank == 0] == [
        (0, "main"),
        (0, "communication, host"),
        (0, "communication, cross"),
    ]
    main = shown.rows[0].boxes
    assert main[0].name == Phase.DATA_WAIT.value
    ends = [box.start_s + box.length_s for box in main]
    assert [box.start_s for box in main[1:]] == pytest.approx(ends[:-1]), "end to end"


def test_a_step_with_spans_is_drawn_where_they_were() -> None:
    record = reported.run(ranks=2, steps=60)
    by_step = {shown.step: shown for shown in steps_of(record, [0, 1], chosen=50)}
    assert sorted(step for step in by_step if step is not None) == list(range(60))
    detailed = by_step[50]
    assert detailed.with_spans
    assert "chosen" in detailed.notes
    lanes = [row.lane for row in detailed.rows if row.rank == 0]
    assert lanes[0] == "main"
    assert lanes.count("comm.cross") == 2, "operations that overlap lie in two rows"
    spans = [span for span in record.ranks[0].spans if span.step == 50 and span.lane == "main"]
    boxes = detailed.rows[0].boxes
    assert [box.length_s for box in boxes] == pytest.approx([(span.end_ns - span.start_ns) / 1e9 for span in spans])
    assert not by_step[49].with_spans


def test_clocks_that_differ_by_more_than_a_step_align_each_rank_at_its_own_start() -> None:
    record = reported.run(ranks=2, steps=10)
    header = dataclasses.replace(record.ranks[1].header, started_wall_ns=reported.START_NS + 3_600 * 10**9)
    off = dataclasses.replace(record, ranks={**record.ranks, 1: dataclasses.replace(record.ranks[1], header=header)})
    assert all(shown.aligned for shown in steps_of(off, [0, 1]))
    assert all(shown.length_s < 1 for shown in steps_of(off, [0, 1]))
    assert not any(shown.aligned for shown in steps_of(record, [0, 1])[:1])


def test_of_too_many_steps_the_slowest_the_chosen_and_those_with_spans_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_module, "CELLS", 0)
    record = reported.run(ranks=2, steps=400)
    found = steps_of(record, [0, 1], chosen=123)
    numbers = {shown.step for shown in found}
    durations = {
        step.step: max(step.duration_s, record.ranks[1].steps[step.step].duration_s) for step in record.ranks[0].steps
    }
    assert max(durations, key=durations.__getitem__) in numbers
    assert {123, *range(0, 400, reported.SPANS_EVERY)} <= numbers
    assert len(found) <= shown_module.LEAST_STEPS + shown_module.SLOWEST + 10
    assert [shown.step for shown in found] == sorted(number for number in numbers if number is not None)


def test_spans_beyond_the_room_are_left_to_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_module, "BOXES", 60)
    record = reported.run(ranks=1, steps=200)
    with_spans = [shown.step for shown in steps_of(record, [0], chosen=150) if shown.with_spans]
    assert 150 in with_spans, "the chosen step keeps its spans"
    assert 0 < len(with_spans) < 4


def test_boxes_too_small_to_see_are_joined() -> None:
    record = reported.run(ranks=1, steps=1, spans=False)
    step = record.ranks[0].steps[0]
    each = round(step.duration_s * 1e9) // 10_000
    spans = tuple(
        Span(0, "lane", "op", step.start_ns + number * each, step.start_ns + number * each + each // 2)
        for number in range(9000)
    )
    rank = dataclasses.replace(record.ranks[0], spans=spans)
    (found,) = steps_of(dataclasses.replace(record, ranks={0: rank}), [0])
    (row,) = found.rows
    assert found.merged
    assert len(row.boxes) == 1
    assert row.boxes[0].length_s == pytest.approx((spans[-1].end_ns - spans[0].start_ns) / 1e9)


def test_a_rank_without_steps_shows_none() -> None:
    record = reported.run(ranks=1, steps=1)
    empty = dataclasses.replace(record, ranks={0: RankRecord(record.ranks[0].header)})
    assert steps_of(empty, [0]) == []
    assert average(breakdowns(empty)) == Shown(None, 0.0, ())
