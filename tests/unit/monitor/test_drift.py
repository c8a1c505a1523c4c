"""Which metric slipped since when."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from lightning_dist.monitor.history.drift import RUNS_AT_LEAST, change_point, drifts
from lightning_dist.monitor.history.series import KINDS
from lightning_dist.monitor.history.summary import MetricSummary, RunSummary, summarise
from lightning_dist.monitor.record import Phase
from tests.support.records import made_run, made_step


def noise(count: int, *, seed: object, mean: float = 1.0) -> list[float]:
    generator = random.Random(f"{seed}")
    return [generator.gauss(mean, 0.05) for _ in range(count)]


def runs_of(**metrics: list[float]) -> list[RunSummary]:
    count = len(next(iter(metrics.values())))
    return [
        RunSummary(
            f"run{i}",
            f"2026-11-{i + 1:02}T00:00:00+00:00",
            metrics={
                name: MetricSummary(values[i], values[i], unit=KINDS[name].unit) for name, values in metrics.items()
            },
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("index", [6, 10, 14])
def test_a_change_is_found_where_it_is(index: int) -> None:
    point = change_point(noise(index, seed=index) + noise(20 - index, seed=-index, mean=1.3))
    assert point is not None
    assert abs(point.index - index) <= 1
    assert point.p < 0.01


def test_what_does_not_change_rarely_does() -> None:
    """At a level of 0.05, 100 series: at most 0.05 and three standard deviations of chance."""
    found = sum(change_point(noise(12, seed=seed)) is not None for seed in range(100))
    assert found <= 5 + 3 * 2.2


@pytest.mark.parametrize("count", [8, 10, 12, 14])
def test_the_chance_of_the_deepest_cut_is_that_of_two_orders(count: int) -> None:
    point = change_point(list(range(count)))
    assert point is not None
    assert point.p == pytest.approx(2 / math.comb(count, count // 2), rel=0.3)


def test_the_longer_a_change_lasts_the_less_it_is_chance() -> None:
    points = [change_point([1.0, 1.1] * half + [2.0, 2.1] * half) for half in (4, 8, 16, 64, 256)]
    chances = [point.p for point in points if point is not None]
    assert len(chances) == 5
    assert all(later < 0.2 * earlier for earlier, later in itertools.pairwise(chances)), chances
    assert chances[-1] < 1e-100


def test_what_comes_in_bursts_slips_although_its_median_does_not() -> None:
    """Each tenth step waits for data, and each fiftieth logs: of most steps both are 0."""
    for name, every in (("data_wait", 10), ("phase.logging", 50), ("phase.other", 50)):
        phase = Phase.DATA_WAIT if name == "data_wait" else Phase(name.removeprefix("phase."))
        runs = []
        for day in range(12):
            burst_s = (0.2 if day < 6 else 0.4) * (1 + day % 3 / 50)
            steps = tuple(
                replace(made_step(i, 1.0), phases={phase: burst_s if i % every == every - 1 else 0.0})
                for i in range(200)
            )
            made = made_run([1.0], ranks=1, run_id=f"run{day}", started=f"2026-11-{day + 1:02}T00:00:00+00:00")
            runs.append(summarise(replace(made, ranks={0: replace(made.ranks[0], steps=steps)})))
        assert {run.metrics[name].median for run in runs} == {0.0}
        (drift,) = drifts(runs, metric=name)
        assert (drift.run_id, drift.is_worse) == ("run6", True)
        assert drift.change == pytest.approx(1.0, abs=0.05)


def test_too_few_runs_say_nothing() -> None:
    assert change_point([1.0] * 3 + [9.0] * (RUNS_AT_LEAST - 4)) is None


def test_a_constant_series_does_not_change() -> None:
    assert change_point([1.0] * 20) is None


def test_the_slipped_metric_is_named_with_the_run_since_which() -> None:
    runs = runs_of(
        step=noise(10, seed=1) + noise(10, seed=2, mean=1.4),
        data_wait=noise(20, seed=3),
        samples_per_s=noise(10, seed=4) + noise(10, seed=5, mean=0.7),
        network_sent=noise(10, seed=6) + noise(10, seed=7, mean=2.0),
    )
    random.Random(0).shuffle(runs)
    found = drifts(runs)
    assert [drift.metric for drift in found] == ["step", "samples_per_s", "network_sent"], "the worst first"
    step = found[0]
    assert step.is_worse
    assert step.run_id == "run10"
    assert step.since == "2026-11-11T00:00:00+00:00"
    assert step.runs == 10
    assert step.change == pytest.approx(0.4, abs=0.08)
    assert [drift.is_worse for drift in found] == [True, True, None]
    assert [drift.metric for drift in drifts(runs, metric="samples_per_s")] == ["samples_per_s"]


def test_the_newest_of_several_changes_is_told() -> None:
    values = noise(12, seed=1) + noise(12, seed=2, mean=2.0) + noise(6, seed=3, mean=1.5)
    (drift,) = drifts(runs_of(step=values))
    assert drift.run_id == "run24"
    assert drift.is_worse is False
    assert drift.before == pytest.approx(2.0, abs=0.1)


def test_where_it_changes_is_told_by_values_not_by_ranks() -> None:
    """The last high values are the lowest of the high ones: by ranks alone the cut would lie before them."""
    point = change_point([2.09, 2.08, 2.07, 2.06, 2.05, 2.04, 2.03, 2.02, 2.01, 2.0, 1.99, 1.98, 1.0, 1.01, 1.02, 1.03])
    assert point is not None
    assert point.index == 12
