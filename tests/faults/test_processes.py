"""Whole processes: all end by themselves, non-zero, with the lost rank's name, and leave nothing behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.fresh import FreshRanks

SCRIPT = Path(__file__).parent / "scripts" / "train.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "lost", "placement"),
    [(signal.SIGKILL, 0, {"a": [0], "b": [1]}), (signal.SIGSTOP, 1, {"a": [0, 1]})],
    ids=["kill", "stop"],
)
def test_the_process_of_the_other_rank_ends(signum: signal.Signals, lost: int, placement: dict[str, list[int]]) -> None:
    host = next(host for host, ranks in placement.items() if lost in ranks)
    with FreshRanks.local([SCRIPT, str(len(placement))], placement=placement) as ranks:
        for rank in range(2):
            ranks.wait_for_output(rank, "under way", deadline_s=60)
        ranks.kill(lost, signum)
        (result,) = ranks.wait(ranks=[1 - lost], deadline_s=60)
        assert result.returncode == 1
        assert f"Error: rank {1 - lost}" in result.stderr.splitlines()[-1]
        assert f"rank {lost} (host {host})" in result.stderr.splitlines()[-1]
        ranks.kill(lost, signal.SIGKILL)
        ranks.wait(ranks=[lost], deadline_s=10)
        assert ranks.survivors(within_s=5) == []
