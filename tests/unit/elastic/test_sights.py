"""What an agent sees: stopped processes, and progress once all ranks know theirs."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from lightning_dist.elastic.detect.board import Beat, Board, Mark
from lightning_dist.elastic.detect.sights import is_stopped, look_at, progress_of
from lightning_dist.elastic.detect.watch import Sight
from lightning_dist.elastic.policy.events import Progress


def test_a_process_is_stopped_until_it_goes_on_or_ends() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        try:
            assert not is_stopped(process.pid)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert is_stopped(process.pid)
            process.send_signal(signal.SIGCONT)
            os.waitid(os.P_PID, process.pid, os.WCONTINUED | os.WNOWAIT)
            assert not is_stopped(process.pid)
        finally:
            process.kill()
    assert not is_stopped(process.pid)


def test_all_cells_are_seen(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", 2)
    board.cell(1).begin(round=3)
    board.cell(1).mark(begun=1, waits=1, what="barrier")
    first, second = look_at(board)
    assert first == Sight(None)
    assert second.beat is not None
    assert (second.beat.round, second.mark.what, second.is_stopped) == (3, "barrier", False)
    board.close()


def test_progress_is_told_once_all_ranks_know_it() -> None:
    known = Sight(Beat(pid=1, round=2, step=7, own_s=0.25), Mark())
    ahead = Sight(Beat(pid=2, round=2, step=8, own_s=0.5), Mark())
    assert progress_of([known, ahead], host="a") == Progress("a", 2, 7, (0.25, 0.5))
    assert progress_of([known, Sight(None)], host="a") is None
    assert progress_of([known, Sight(Beat(pid=2, round=2, step=7))], host="a") is None
    assert progress_of([], host="a") is None
