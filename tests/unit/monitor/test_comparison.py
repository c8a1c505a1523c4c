"""Two runs compared: what is significant, and how often chance is taken for it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import pytest

from lightning_dist.monitor.history.blocks import in_blocks
from lightning_dist.monitor.history.comparison import (
    BLOCKS_AT_LEAST,
    LEVEL,
    Change,
    Difference,
    compare,
    mann_whitney_p,
    shift,
)
from lightning_dist.monitor.history.summary import RunSummary, summarise
from tests.support.records import made_run
from tests.unit.monitor.test_history import correlated

PAIRS = 300


def summary_of(values: list[float], **facts: object) -> RunSummary:
    return summarise(made_run(values, ranks=1, **facts))


def steps(mean: float, *, seed: object, memory: float = 0.5) -> list[float]:
    """Steps that spread by a tenth."""
    return [mean * (1 + 0.1 * value) for value in correlated(600, memory, seed=seed)]


def difference(first: RunSummary, second: RunSummary, metric: str = "step", **given: RunSummary) -> Difference:
    return next(each for each in compare(first, second, **given).differences if each.metric == metric)


def test_p_is_that_of_all_arrangements() -> None:
    """Against the exact distribution of the rank sum; the approximation is within a hundredth at this size."""
    first, second = [1.0, 2.0, 3.0, 4.0, 6.0, 9.0, 10.0, 12.0], [5.0, 7.0, 8.0, 11.0, 13.0, 14.0, 15.0, 16.0]
    sums = [sum(chosen) for chosen in combinations(range(1, 17), 8)]
    off = abs(sum(first) - 8 * 17 / 2)
    exact = sum(abs(total - 68) >= off for total in sums) / math.comb(16, 8)
    assert mann_whitney_p(first, second) == pytest.approx(exact, abs=0.01)


def test_equal_values_are_no_difference() -> None:
    assert mann_whitney_p([1.0] * 9, [1.0] * 9) == 1.0


def test_shift_and_its_interval() -> None:
    first = [float(i) for i in range(20)]
    middle, low, high = shift(first, [value + 5 for value in first])
    assert middle == 5
    assert low < 5 < high
    assert 5 - low == high - 5


@pytest.mark.parametrize(("count", "memory"), [(200, 0.0), (200, 0.5), (500, 0.8), (2000, 0.5)])
def test_chance_is_rarely_taken_for_a_difference(count: int, memory: float) -> None:
    """At most the level, and what 300 pairs may be off by chance: three standard deviations, 0.05 + 0.038.

    Pairs too short for their memory are not judged, and count as no difference.
    """
    wrong = 0
    for pair in range(PAIRS):
        first, second = (in_blocks(correlated(count, memory, seed=(pair, side, memory))).values for side in "ab")
        judged = min(len(first), len(second)) >= BLOCKS_AT_LEAST
        wrong += judged and mann_whitney_p(first, second) < LEVEL
    assert wrong / PAIRS <= LEVEL + 3 * math.sqrt(LEVEL * (1 - LEVEL) / PAIRS)


def test_without_blocks_chance_is_taken_for_a_difference() -> None:
    """Why there are blocks: the same test on the steps themselves."""
    wrong = sum(
        mann_whitney_p(*(correlated(200, 0.8, seed=(pair, side)) for side in "ab")) < LEVEL for pair in range(60)
    )
    assert wrong / 60 > 0.25


def test_a_slower_run_is_worse() -> None:
    first, second = summary_of(steps(1.0, seed=1)), summary_of(steps(1.2, seed=2))
    slower = difference(first, second)
    assert slower.what is Change.WORSE
    assert slower.change == pytest.approx(0.2, abs=0.03)
    assert slower.low is not None
    assert slower.high is not None
    assert 0 < slower.low < 0.2 < slower.high
    assert difference(first, second, "samples_per_s").what is Change.WORSE
    assert difference(second, first).what is Change.BETTER


def test_the_same_run_is_the_same() -> None:
    first, second = summary_of(steps(1.0, seed=3)), summary_of(steps(1.0, seed=4))
    assert {each.what for each in compare(first, second).differences} <= {Change.SAME}


def test_too_short_runs_are_not_judged() -> None:
    first, second = summary_of([1.0, 1.1] * 6), summary_of([3.0, 3.1] * 6)
    short = difference(first, second)
    assert short.what is Change.UNKNOWN
    assert short.p is None
    assert short.times_longer is not None
    assert short.times_longer > 1
    assert short.change == pytest.approx(2.0, abs=0.2)


def test_many_metrics_are_held_to_more() -> None:
    """Holm's p-values are at least the metric's own, and at most that times the number of metrics."""
    first, second = summary_of(steps(1.0, seed=5)), summary_of(steps(1.03, seed=6))
    compared = compare(first, second).differences
    tested = [each for each in compared if each.p is not None]
    for each in tested:
        own = mann_whitney_p(first.metrics[each.metric].blocks, second.metrics[each.metric].blocks)
        assert own <= (each.p or 0.0) <= min(own * len(tested) * (1 + 1e-12), 1.0)


def test_what_runs_of_a_configuration_usually_differ_by_is_no_news() -> None:
    first, second = summary_of(steps(1.0, seed=7)), summary_of(steps(1.1, seed=8), run_id="second")
    like = [summary_of(steps(mean, seed=mean), run_id=f"{mean}") for mean in (0.85, 1.0, 1.02, 1.15)]
    assert difference(first, second, history=like).what is Change.USUAL
    others = [replace(run, config_hash="other") for run in like]
    assert difference(first, second, history=others).what is Change.WORSE
    assert difference(first, second, history=like[:2]).usual is None
    later = [replace(run, started="2026-12-01T00:00:00+00:00") for run in like]
    assert difference(first, second, history=later).usual is None, "they may have what is looked for"


def test_options_and_machines_that_differ_are_said() -> None:
    first = summary_of([1.0] * 20, options={"a": 1, "b": 2}, commit="1" * 40, versions={"torch": "1"})
    second = summary_of([1.0] * 20, options={"a": 1, "b": 3, "c": 4}, commit="2" * 40, versions={"torch": "2"})
    compared = compare(first, replace(second, world_size=8, host_kind="other"))
    assert compared.options == {"b": (2, 3), "c": (None, 4)}
    assert [note.split(":")[0] for note in compared.notes] == [
        "other machines",
        "other numbers of ranks",
        "other commits",
        "other versions of torch",
    ]


def test_a_metric_that_was_zero_has_no_change_but_a_verdict() -> None:
    first, second = summary_of([1.0] * 200), summary_of([1.0] * 200)
    zero, some = first.metrics["phase.checkpoint"], replace(first.metrics["step"], of_means=True)
    second = replace(second, metrics={**second.metrics, "phase.checkpoint": some})
    assert zero.median == 0
    grown = difference(first, second, "phase.checkpoint")
    assert grown.change is None
    assert grown.what is Change.WORSE


def test_medians_of_an_earlier_release_are_not_tested_against_means() -> None:
    first, second = summary_of([1.0] * 200), summary_of([1.0] * 200)
    earlier = replace(first.metrics["data_wait"], of_means=False, blocks=(3.0,) * 20)
    first = replace(first, metrics={**first.metrics, "data_wait": earlier})
    compared = compare(first, second)
    assert {each.metric: each.what for each in compared.differences}["data_wait"] is Change.UNKNOWN
    assert "cannot be tested: data_wait;" in compared.notes[0]


def test_two_metrics_of_median_zero_differ_neither_way() -> None:
    """Their blocks differ, and nothing says that less of it would be better."""
    first, second = summary_of([1.0] * 200), summary_of([1.0] * 200)
    zero = replace(first.metrics["step"], median=0.0, mean=0.0, blocks=(0.0,) * 20)
    some = replace(zero, blocks=(0.0,) * 8 + (1.0,) * 12)
    first = replace(first, metrics={"phase.logging": zero})
    second = replace(second, metrics={"phase.logging": some})
    assert difference(first, second, "phase.logging").what is Change.CHANGED


def test_what_is_usual_of_rare_values_is_that_of_their_means() -> None:
    """Medians of retransmits lie close together where means do not."""
    first = summary_of([1.0] * 200)
    of = replace(first.metrics["step"], median=1.0, unit="1/s")
    likes = [
        replace(first, run_id=f"{mean}", metrics={"tcp_retransmits": replace(of, mean=mean)})
        for mean in (10.0, 10.0, 30.0)
    ]
    found = difference(likes[0], replace(likes[0], run_id="second"), "tcp_retransmits", history=likes)
    assert found.usual == pytest.approx(2.0)
