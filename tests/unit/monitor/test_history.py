"""What is kept of a run: series, blocks, the record and its versions, the folder."""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_dist.errors import RecordError
from lightning_dist.monitor.history.blocks import BLOCKS_AT_MOST, autocorrelation_time, average_ranks, in_blocks
from lightning_dist.monitor.history.folder import named, read_history, read_summary, write_summary
from lightning_dist.monitor.history.series import KINDS, run_series
from lightning_dist.monitor.history.summary import VERSION, RunSummary, from_json, summarise, to_json
from lightning_dist.monitor.record import METRICS, Phase
from lightning_dist.monitor.verdict import Cause, Finding, Verdict
from tests.support.records import made_run

RECORDS = Path(__file__).parent / "records"


def correlated(count: int, memory: float, *, seed: object, mean: float = 0.0) -> list[float]:
    """An autoregressive series of variance 1."""
    generator = random.Random(f"{seed}")
    value = generator.gauss(0, 1)
    values = []
    for _ in range(count):
        value = memory * value + math.sqrt(1 - memory**2) * generator.gauss(0, 1)
        values.append(mean + value)
    return values


def test_series_are_over_all_ranks_and_leave_the_first_steps_out() -> None:
    run = made_run([1.0] * 5 + [0.25] * 95, samples={"memory": [1.0, 3.0], "unknown": [1.0], "cpu_utilisation": []})
    series = run_series(run)
    assert series["step"] == (0.25,) * 90
    assert set(series["samples_per_s"]) == {2 * 8 / 0.25}
    assert set(series["tokens_per_s"]) == {2 * 800 / 0.25}
    assert set(series["exposed_communication_share"]) == {0.1}
    assert series["phase.forward"] == pytest.approx([0.225] * 90)
    assert series["memory"] == (1.0, 3.0)
    assert "unknown" not in series
    assert "phase.backward" not in series, "not told apart is not 0"


def test_ranks_that_read_the_same_samples_count_once() -> None:
    run = made_run([0.5] * 20, ranks=4)
    ranks = {
        number: replace(rank, header=replace(rank.header, facts={"data_parallel_rank": number // 2}))
        for number, rank in run.ranks.items()
    }
    assert set(run_series(replace(run, ranks=ranks))["samples_per_s"]) == {2 * 8 / 0.5}


def test_steps_that_a_rank_lacks_are_left_out() -> None:
    run = made_run([0.5] * 8)
    ranks = {**run.ranks, 1: replace(run.ranks[1], steps=run.ranks[1].steps[:3])}
    assert len(run_series(replace(run, ranks=ranks))["step"]) == 3


def test_steps_done_again_after_a_resume_count_once() -> None:
    run = made_run([0.5] * 8)
    again = {
        number: (*rank.steps, *(replace(step, duration_s=1.0) for step in rank.steps[5:]))
        for number, rank in run.ranks.items()
    }
    ranks = {number: replace(rank, steps=again[number]) for number, rank in run.ranks.items()}
    assert run_series(replace(run, ranks=ranks))["step"] == (0.5,) * 5 + (1.0,) * 3


def test_a_counter_is_what_it_gains_a_second() -> None:
    """However long the run goes on after the one timeout, its sum is one."""
    for count in (100, 400):
        run = made_run([1.0] * 20, samples={"heartbeat_timeouts": [0.0] * 50 + [1.0] * (count - 50)})
        values = run_series(run)["heartbeat_timeouts"]
        assert (len(values), sum(values)) == (count - 1, 1.0)


def test_every_metric_and_phase_has_a_kind() -> None:
    assert set(METRICS) <= set(KINDS)
    assert {f"phase.{phase.value}" for phase in Phase if phase is not Phase.DATA_WAIT} <= set(KINDS)


def test_equal_values_share_their_ranks() -> None:
    assert average_ranks([3.0, 1.0, 3.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]


@pytest.mark.parametrize("memory", [0.0, 0.5, 0.8])
def test_autocorrelation_time_is_that_of_theory(memory: float) -> None:
    """(1 + phi) / (1 - phi) for an autoregressive series; one estimate is off by a fifth, so eight are averaged."""
    expected = (1 + memory) / (1 - memory)
    times = [autocorrelation_time(correlated(5000, memory, seed=seed)) for seed in range(8)]
    assert statistics.fmean(times) == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("values", [[], [1.0], [2.0] * 50, [0.0, 1.0] * 50])
def test_what_has_no_memory_to_see_has_none(values: list[float]) -> None:
    assert autocorrelation_time(values) == 1.0


def test_blocks_are_long_against_the_memory_and_few() -> None:
    blocks = in_blocks(correlated(2000, 0.8, seed=2))
    assert 25 <= blocks.length <= 60, "four times an autocorrelation time of 9"
    assert len(blocks.values) == 2000 // blocks.length
    assert len(in_blocks([float(i % 7) for i in range(9999)]).values) <= BLOCKS_AT_MOST
    assert in_blocks([]).values == ()


def test_blocks_of_rare_values_are_means() -> None:
    values = [0.0, 0.0, 0.0, 4.0] * 16
    assert set(in_blocks(values).values) == {0.0}
    assert sum(in_blocks(values, of_means=True).values) > 0


def test_summary_holds_what_the_run_was() -> None:
    run = made_run([0.25, 0.5] * 50, facts={"cpu_model": "Model X", "cpu_cores": 2}, commit="abc", options={"a.b": 1})
    finding = Finding(Cause.DATA_PIPELINE, 0.4, 0.9, "Ranks wait for batches.")
    summary = summarise(run, Verdict(finding))
    step = summary.metrics["step"]
    assert (step.median, step.mean, step.spread, step.count, step.unit) == (0.375, 0.375, 0.25, 90, "s")
    assert (summary.cause, summary.cause_share, summary.verdict) == ("data_pipeline", 0.4, finding.summary)
    assert (summary.host_kind, summary.hosts, summary.steps) == ("2 cores of Model X", 1, 100)
    assert summarise(run, Verdict(None, no_verdict="too short")).verdict == "too short"
    assert from_json(json.loads(json.dumps(to_json(summary)))) == summary


def test_an_empty_run_has_a_summary() -> None:
    summary = summarise(made_run([]))
    assert summary.metrics == {}
    assert from_json(to_json(summary)) == summary


@pytest.mark.parametrize("version", range(VERSION + 1))
def test_records_of_every_version_read(version: int) -> None:
    summary = read_summary(RECORDS / f"version{version}.json")
    assert summary.run_id == f"old-{version}"
    assert summary.metrics["step"].median == {0: 0.05, 1: 0.02, 2: 0.02}[version]
    assert summary.config_hash == {0: "abc", 1: "def", 2: "def"}[version]
    assert summary.metrics["step"].unit == "s"
    assert summary.moment.year == 2026
    assert from_json(to_json(summary)) == summary


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"version": VERSION + 1}, f"reads up to {VERSION}"),
        ({}, "no version"),
        ([], "no version"),
        ({"version": 1, "metrics": {"step": 3}}, "no record"),
        ({"version": 1, "metrics": {"step": {"mean": 1}}, "run_id": "a", "started": "b"}, "median"),
        ({"version": 0, "metrics": [1], "run_id": "a", "started": "b"}, "no record"),
        ({"version": 1, "metrics": {}, "run_id": "a", "started": None}, "None is no text"),
        ({"version": 1, "metrics": {}, "run_id": 5, "started": "b"}, "5 is no text"),
        ({"version": 1, "metrics": {}, "run_id": "a", "started": "b", "config_hash": ["c"]}, "is no text"),
        ({"version": 1, "metrics": {}, "run_id": "a", "started": "b", "options": 3}, "no record"),
        ({"version": 1, "metrics": {}, "run_id": "a", "started": "b", "world_size": math.inf}, "no record"),
        ({"version": 1, "metrics": {"step": {"median": "x", "mean": 1}}, "run_id": "a", "started": "b"}, "no record"),
        ({"version": 1, "metrics": {"step": {"median": math.nan, "mean": 1}}, "run_id": "a", "started": "b"}, "finite"),
    ],
)
def test_what_is_no_record_is_refused(values: object, says: str) -> None:
    with pytest.raises(RecordError, match=says):
        from_json(values)


def test_a_folder_keeps_runs_and_names_what_it_cannot_read(tmp_path: Path) -> None:
    later, earlier = RunSummary("b/1", "2026-02-01T00:00:00+00:00"), RunSummary("a1", "2026-01-01T00:00:00+05:00")
    for run in (later, earlier, replace(earlier, steps=3)):
        write_summary(tmp_path, run)
    (tmp_path / "bad.json").write_text("{")
    history = read_history(tmp_path)
    assert history.runs == (replace(earlier, steps=3), later)
    assert len(history.problems) == 1
    assert "bad.json" in history.problems[0]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json"] * 3
    assert named(history.runs, "b") == later
    with pytest.raises(RecordError, match="no such run; there are: a1, b/1"):
        named(history.runs, "c")
    with pytest.raises(RecordError, match="several"):
        named((later, replace(later, run_id="b/2")), "b")


def test_no_folder_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"or where monitor\.history says; name the folder with --history"):
        read_history(tmp_path / "none")
