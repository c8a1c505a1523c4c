"""Two runs of a benchmark that take turns."""

from __future__ import annotations

from pathlib import Path

from benchmarks.elastic.turns import BLOCK, FIRST, Turn, give, median_interval, step_seconds


def test_a_block_is_done_once_all_ranks_have_done_its_steps(tmp_path: Path) -> None:
    give(tmp_path, "plain", 0)
    ranks = [Turn(tmp_path, "plain", rank) for rank in range(2)]
    for rank, turn in enumerate(ranks):
        for step in range(1, FIRST + BLOCK):
            assert step_seconds(tmp_path, "plain", 0, ranks=rank + 1) is None
            turn.before_step(step)
            turn.after_step(step)
    found = step_seconds(tmp_path, "plain", 0, ranks=2)
    assert found is not None
    assert min(found) > 0
    assert step_seconds(tmp_path, "guarded", 0, ranks=2) is None


def test_blocks_hold_whole_intervals_of_snapshots() -> None:
    steps = range(FIRST, FIRST + BLOCK)
    assert len([step for step in steps if step % 5 == 0]) == BLOCK // 5
    assert steps[-1] % 5 == 2


def test_a_median_is_where_most_values_are() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert median_interval([float(number) for number in range(100)]) == (40.0, 59.0)
