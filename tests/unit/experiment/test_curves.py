"""What ranks write down becomes one curve, and pairs of curves a comparison."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lightning_dist.errors import RecordError, UnknownOptionError
from lightning_dist.experiment.comparison import Pair, compare
from lightning_dist.experiment.curves import Curve, Track, joined, rank_curve, rank_file, read_curve, smoothed
from lightning_dist.experiment.picture import ticks
from lightning_dist.experiment.verdict import Answer, Margin

MARGIN = Margin.parse("1%")


def lines(*losses: float, rank: int = 0, step_s: float = 1.0, size: int = 2, **more: Any) -> list[dict[str, Any]]:
    steps = [
        {"kind": "step", "step": step, "seconds": step * step_s, "loss": loss, **more}
        for step, loss in enumerate(losses, start=1)
    ]
    start = {"kind": "start", "version": 1, "rank": rank, "world_size": size, "nodes": 1}
    return [start, *steps, {"kind": "end", "step": len(losses)}]


def curve(*losses: float, step_s: float = 1.0, **more: Any) -> Curve:
    return joined([rank_curve(lines(*losses, step_s=step_s, size=1, **more))])


def test_a_run_is_the_mean_of_its_ranks_and_as_slow_as_the_slowest() -> None:
    ranks = [
        rank_curve(lines(4.0, 2.0, crossed=100, sent=70)),
        rank_curve(lines(6.0, 3.0, rank=1, step_s=2.0, crossed=300)),
    ]
    run = joined(ranks)
    assert run.losses == Track((1, 2), (2.0, 4.0), (5.0, 2.5))
    assert run.step_s == (2.0, 2.0)
    assert run.crossed_bytes == 400
    assert run.sent_bytes == 70
    assert (run.ranks, run.world_size, run.is_whole) == (2, 2, True)


def test_traffic_in_some_steps_counts_in_all() -> None:
    written = lines(1.0, 1.0, 1.0, 1.0)
    written[4]["crossed"] = 800
    assert joined([rank_curve(written)]).crossed_bytes == 200


def test_steps_of_a_restart_replace_those_before() -> None:
    run = joined([rank_curve([*lines(4.0, 3.0, 9.0)[:-1], *lines(4.0, 3.0, 2.0)[2:]])])
    assert run.losses.values == (4.0, 3.0, 2.0)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines(4.0, 3.0)[:-1])
    rank_file(tmp_path, 0).write_text(text + '{"kind":"step","st')
    run = read_curve(tmp_path)
    assert run.num_steps == 2
    assert not run.is_whole
    assert (run.ranks, run.world_size) == (1, 2)


def test_nothing_recorded_is_said(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no step was recorded"):
        read_curve(tmp_path)
    rank_file(tmp_path, 0).write_text('{"kind":"start","version":9}\n')
    with pytest.raises(RecordError, match="a later release"):
        read_curve(tmp_path)


def test_validation_is_a_track_of_its_own() -> None:
    written = lines(4.0, 3.0)
    written.insert(2, {"kind": "validation", "step": 1, "metrics": {"val_loss": 3.5}})
    written.insert(4, {"kind": "validation", "step": 2, "metrics": {"val_loss": 2.5}})
    run = joined([rank_curve(written), rank_curve(lines(4.0, 3.0, rank=1))])
    assert run.track("val_loss") == Track((1, 2), (1.0, 2.0), (3.5, 2.5))
    assert run.track("accuracy") is None


def test_tracks_are_read_at_steps_times_and_levels() -> None:
    track = Track((2, 4), (10.0, 20.0), (3.0, 1.0))
    assert math.isnan(track.at_step(1))
    assert (track.at_step(2), track.at_step(3), track.at_step(9)) == (3.0, 3.0, 1.0)
    assert (track.at_seconds(19.9), track.at_seconds(20)) == (3.0, 1.0)
    assert track.seconds_to(2.0) == 20.0
    assert math.isnan(track.seconds_to(0.5))


def test_smoothing_is_a_mean_over_what_was() -> None:
    track = Track((1, 2, 3, 4), (1.0, 2.0, 3.0, 4.0), (8.0, 4.0, 6.0, 2.0))
    assert smoothed(track, 2).values == (8.0, 6.0, 5.0, 4.0)
    lost = smoothed(Track((1, 2, 3), (1.0, 2.0, 3.0), (1.0, math.inf, 1.0)), 1)
    assert lost.values == (1.0, math.inf, 1.0), "what was before and after is not spoiled"


def pairs(count: int, *, worse_by: float = 0.0, b_step_s: float = 0.5) -> list[Pair]:
    made = []
    for seed in range(count):
        losses = [4.0 - 0.1 * step + 0.01 * seed for step in range(20)]
        first = curve(*losses, crc=7, crossed=4000)
        second = curve(losses[0], *(loss + worse_by + 1e-4 * seed for loss in losses[1:]), step_s=b_step_s, crc=7)
        made.append(Pair(seed, first, second))
    return made


def test_a_faster_arm_is_ahead_at_equal_time() -> None:
    found = compare(pairs(4), margin=MARGIN)
    table = {quantity.name: quantity for quantity in found.quantities}
    assert found.judgement.answer is Answer.SAFE
    assert found.window == 2
    assert table["loss at equal steps"].change.mean == pytest.approx(1.5e-4)
    # In the time in which b does its 20 steps, a does 10.
    assert table["loss at equal time"].change.mean == pytest.approx(-1.0 + 1.5e-4)
    assert table["step, median"].change.mean == pytest.approx(0.5)
    assert table["time to the loss that both reach"].change.mean == pytest.approx(0.5)
    assert found.notes == ()


def test_bytes_are_compared_where_both_arms_know_them() -> None:
    known = [Pair(seed, curve(4.0, 3.0, crossed=400), curve(4.0, 3.0, crossed=100)) for seed in (0, 1)]
    table = {quantity.name: quantity for quantity in compare(known, margin=MARGIN).quantities}
    assert table["payload to other hosts, a step, all ranks"].change.mean == pytest.approx(0.25)
    assert "payload to other hosts, a step, all ranks" not in {
        quantity.name for quantity in compare(pairs(2), margin=MARGIN).quantities
    }


def test_a_worse_arm_is_not_safe() -> None:
    assert compare(pairs(4, worse_by=0.5), margin=MARGIN).judgement.answer is Answer.NOT_SAFE


def test_what_is_no_pair_is_said() -> None:
    found = compare([Pair(3, curve(4.0, 3.0, crc=1), curve(4.0, 2.9, crc=2))], margin=MARGIN)
    assert "did not read the same samples" in found.notes[0]
    found = compare([Pair(3, curve(4.0, 3.0), curve(4.1, 2.9, 2.8))], margin=MARGIN)
    assert "did not begin with the same loss (seeds 3)" in found.notes[0]
    assert "were compared at 2" in found.notes[1]
    same = compare([Pair(3, curve(4.0, 3.0), curve(4.0, 3.0))], margin=MARGIN)
    assert "no effect here" in same.notes[0]


def test_a_metric_that_is_not_there_is_refused() -> None:
    with pytest.raises(UnknownOptionError, match="allowed: loss"):
        compare(pairs(1), margin=MARGIN, metric="val_loss")
    with pytest.raises(RecordError, match="no pair"):
        compare([], margin=MARGIN)


def test_ticks_are_round() -> None:
    assert ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert ticks(0.13, 0.29) == pytest.approx([0.15, 0.2, 0.25])
    assert ticks(3, 3) == [3]
