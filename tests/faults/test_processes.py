"""Whole processes: all end by themselves, non-zero, with the lost rank's name, and leave nothing behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.fresh import FreshRanks

SCRIPT = Path(__file__).parent / "scripts" / "train.py"


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "lost"), [(signal.SIGKILL, 0), (signal.SIGSTOP, 3)], ids=["kill", "stop"])
def test_all_processes_end_when_one_is_lost(signum: signal.Signals, lost: int) -> None:
    survivors = [rank for rank in range(4) if rank != lost]
    with FreshRanks.local(SCRIPT, placement={"a": [0, 1], "b": [2, 3]}) as ranks:
        for rank in range(4):
            ranks.wait_for_output(rank, "under way", deadline_s=60)
        ranks.kill(lost, signum)
        for result in ranks.wait(ranks=survivors, deadline_s=30):
            assert result.returncode == 1
            assert f"rank {lost} (host {'ab'[lost // 2]})" in result.stderr.splitlines()[-1]
            assert "Error: rank" in result.stderr.splitlines()[-1]
        ranks.kill(lost, signal.SIGKILL)
        ranks.wait(ranks=[lost], deadline_s=10)
        assert ranks.survivors(within_s=5) == []
