"""The board: what is written is what is read, whole, by another process, also if the writer dies in the middle."""

from __future__ import annotations

import math
import mmap
import os
import signal
import stat
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_dist.elastic.detect.board import Beat, Board, Cell, Mark
from lightning_dist.elastic.detect.phases import Order, Phase
from lightning_dist.elastic.detect.records import Record, slot_bytes
from lightning_dist.errors import LaunchError
from tests.support.ranks import Died, RankContext, RankPool

_FIELDS = struct.Struct("<QQ96s")
_SIZE = 8 + _FIELDS.size + 4  # with number and checksum


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    board = Board.create(tmp_path / "board", 2)
    yield board
    board.close()


class Clock:
    now_ns = 1_000

    def __call__(self) -> int:
        self.now_ns += 1_000
        return self.now_ns


@pytest.fixture
def cell() -> Iterator[Cell]:
    with mmap.mmap(-1, 4096) as memory:
        yield Cell(memory, 0, Clock())


def test_nothing_is_read_before_a_rank_begins(board: Board) -> None:
    assert board.cell(0).read() is None
    assert board.cell(0).read_mark() == Mark()
    assert board.cell(0).ordered() == (Order.NONE, 0)


def test_what_a_rank_writes_the_agent_reads(board: Board) -> None:
    opened = Board.open(board.path)
    cell = opened.cell(1)
    cell.begin(round=3)
    cell.write(phase=Phase.TRAINING, step=7, snapshot_step=5, step_s=0.25, own_s=0.125)
    cell.answer(7)
    opened.close()
    beat = board.cell(1).read()
    assert beat is not None
    assert (beat.pid, beat.round, beat.step, beat.phase, beat.beats) == (os.getpid(), 3, 7, Phase.TRAINING, 1)
    assert (beat.snapshot_step, beat.answered_step, beat.step_s, beat.own_s) == (5, 7, 0.25, 0.125)
    assert board.cell(0).read() is None


def test_what_is_not_given_stays(cell: Cell) -> None:
    cell.begin(round=1)
    cell.write(phase=Phase.TRAINING, step=7, snapshot_step=5)
    before = cell.read()
    cell.write(step=8)
    after = cell.read()
    assert before is not None
    assert after is not None
    # Numbers that are not known are not equal to themselves.
    known = {"step_s": 0.0, "own_s": 0.0}
    assert replace(after, **known) == replace(before, step=8, beats=2, at_ns=after.at_ns, **known)
    assert after.at_ns > before.at_ns
    assert math.isnan(after.step_s)


def test_the_times_of_a_start_are_set_once(cell: Cell) -> None:
    cell.begin(round=1)
    times = {}
    phases = (Phase.JOINING, Phase.LOADING, Phase.FIRST_STEP, Phase.TRAINING, Phase.SAVING, Phase.TRAINING)
    for number, phase in enumerate(phases):
        cell.write(phase=phase, step=10 + number)
        beat = cell.read()
        assert beat is not None
        assert beat.since_ns == beat.at_ns
        times[number] = beat.at_ns
    assert (beat.started_ns, beat.joined_ns, beat.loaded_ns, beat.first_step_ns) == (
        2_000,
        times[1],
        times[2],
        times[3],
    )


def test_a_beat_in_the_same_phase_does_not_begin_it_anew(cell: Cell) -> None:
    cell.begin(round=1)
    cell.write(phase=Phase.SAVING)
    first = cell.read()
    cell.write(phase=Phase.SAVING)
    second = cell.read()
    assert first is not None
    assert second is not None
    assert (second.since_ns, second.beats) == (first.since_ns, first.beats + 1)


def test_marks_and_orders_have_their_own_place(cell: Cell) -> None:
    cell.begin(round=2)
    cell.mark(begun=4, waits=1, what="all_reduce on 'cross'" + "é" * 100)
    assert cell.ordered_why() == ""
    cell.order(Order.RELEASE, 2, "rank 3 (host b) hangs")
    assert cell.ordered() == (Order.RELEASE, 2)
    assert cell.ordered_why() == "rank 3 (host b) hangs"
    mark = cell.read_mark()
    assert (mark.begun, mark.waits) == (4, 1)
    assert mark.what.startswith("all_reduce on 'cross'é")
    assert len(mark.what.encode()) <= 98  # a character that is cut in half is shown as one that cannot be read


def test_a_rank_of_the_next_round_goes_on_where_the_dead_one_wrote(board: Board) -> None:
    first = Board.open(board.path)
    first.cell(0).begin(round=1)
    first.cell(0).write(step=5)
    first.close()
    second = Board.open(board.path)
    second.cell(0).begin(round=2)
    second.close()
    beat = board.cell(0).read()
    assert beat is not None
    assert (beat.round, beat.step, beat.beats) == (2, -1, 0)


def test_the_same_process_goes_on_where_it_wrote(board: Board) -> None:
    board.cell(0).begin(round=4)
    opened = Board.open(board.path)
    opened.cell(0).resume(round=4)
    opened.cell(0).write(step=1)
    began, now = board.cell(0).read(), opened.cell(0).read()
    assert began is not None
    assert now is not None
    assert (now.round, now.step, now.beats) == (4, 1, 1)
    started_ns = now.started_ns
    opened.cell(0).resume(round=5)  # it has outlived a round
    assert (resumed := opened.cell(0).read()) is not None
    assert (resumed.round, resumed.step, resumed.beats) == (5, -1, 0)
    assert resumed.started_ns > started_ns
    opened.close()


def test_only_the_user_reads_the_board(board: Board) -> None:
    assert stat.S_IMODE(board.path.stat().st_mode) == 0o600
    assert [path.name for path in board.path.parent.iterdir()] == ["board"]


def test_a_new_board_is_not_written_by_ranks_of_the_old_one(board: Board) -> None:
    old = Board.open(board.path)
    fresh = Board.create(board.path, 2)
    old.cell(0).begin(round=1)
    assert fresh.cell(0).read() is None
    old.close()
    fresh.close()


def test_hangs_are_counted_for_the_ranks(board: Board) -> None:
    opened = Board.open(board.path)
    assert opened.timeouts == 0
    board.count_timeouts(2)
    board.count_timeouts(1)
    assert opened.timeouts == 3
    opened.close()


def test_a_rank_writes_after_it_began(board: Board) -> None:
    with pytest.raises(LaunchError, match=r"before begin\(\)"):
        board.cell(0).write(step=1)


def test_no_board_and_no_cell_are_explained(board: Board, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="unset it for other processes"):
        Board.open(tmp_path / "none")
    (tmp_path / "other").write_bytes(b"something else")
    with pytest.raises(LaunchError, match="no board of this version"):
        Board.open(tmp_path / "other")
    with pytest.raises(LaunchError, match="local rank 2 has no cell on the agent's board, which is for 2"):
        board.cell(2)


@pytest.mark.parametrize("written_bytes", [*range(0, _SIZE, 8), _SIZE - 1, _SIZE])
def test_a_writer_that_ends_in_the_middle_leaves_the_value_before(written_bytes: int) -> None:
    with mmap.mmap(-1, 4096) as memory:
        record = Record(memory, 0, _FIELDS)
        record.write(1, 1, b"w" * 96)
        record.write(2, 2, b"x" * 96)
        start = slot_bytes(_FIELDS)  # the slot of uneven numbers
        before = memory[start : start + _SIZE]
        record.write(3, 3, b"y" * 96)
        memory[start + written_bytes : start + _SIZE] = before[written_bytes:]
        assert record.read() == ((3, 3, b"y" * 96) if written_bytes == _SIZE else (2, 2, b"x" * 96))
        Record(memory, 0, _FIELDS).write(4, 4, b"z" * 96)  # of the process that comes next
        assert record.read() == (4, 4, b"z" * 96)


def _write_for_ever(context: RankContext, path: str) -> None:
    board = Board.open(Path(path))
    cell = board.cell(0)
    cell.begin(round=1)
    number = 0
    while True:
        number += 1
        cell.write(step=number, snapshot_step=number, step_s=float(number), own_s=float(number))
        cell.mark(begun=number, waits=number % 2, what=f"{number} " * 10)


def _read(context: RankContext, path: str, reads: int) -> tuple[int, int]:
    """How many different values were seen; ends the writer."""
    board = Board.open(Path(path))
    cell = board.cell(0)
    try:
        while (beat := cell.read()) is None:
            pass
        pid, steps, newest = beat.pid, set(), -1
        for _ in range(reads):
            found = cell.read()
            assert found is not None
            _check_whole(found, cell.read_mark())
            assert found.step >= newest
            newest = found.step
            steps.add(newest)
        os.kill(pid, signal.SIGKILL)
        last = cell.read()
        assert last is not None
        _check_whole(last, cell.read_mark())
        return pid, len(steps)
    finally:
        board.close()


def _check_whole(beat: Beat, mark: Mark) -> None:
    if beat.beats:
        assert beat.beats == beat.step == beat.snapshot_step == beat.step_s == beat.own_s
    assert mark.what.split() == [str(mark.begun)] * (10 if mark.begun else 0)


def _one_of_two(context: RankContext, path: str) -> object:
    if context.rank == 0:
        return _write_for_ever(context, path)
    return _read(context, path, 3_000)


def test_another_process_never_reads_a_torn_value(ranks: RankPool, board: Board) -> None:
    written, read = ranks.run(
        _one_of_two, world_size=2, args=(str(board.path),), init_group=False, may_die=[0], deadline_s=60
    )
    assert written == Died(-signal.SIGKILL)
    assert read[1] > 2  # the writer wrote while it was read
