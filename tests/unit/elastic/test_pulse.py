"""A rank's side of the board: seconds of steps, what was waited, phases; and the order that frees it."""

from __future__ import annotations

import json
import math
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_dist.elastic.detect.board import FILE, Beat, Board
from lightning_dist.elastic.detect.last_words import leave_words
from lightning_dist.elastic.detect.phases import Order, Phase
from lightning_dist.elastic.detect.pulse import Pulse
from lightning_dist.elastic.detect.release import ReleaseWatch
from lightning_dist.errors import LaunchError

DEADLINE_S = 20.0


class Rank:
    """A pulse, with its clock and its waiting in our hand."""

    def __init__(self, board: Board) -> None:
        self.now_s = self.waited_s = 0.0
        self.board = board
        self.pulse = Pulse(Board.open(board.path), local_rank=0, round=1, clock_s=lambda: self.now_s)
        self.pulse.know_waits(lambda: self.waited_s)

    @property
    def beat(self) -> Beat:
        beat = self.board.cell(0).read()
        assert beat is not None
        return beat


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    board = Board.create(tmp_path / FILE, 1)
    yield board
    board.close()


@pytest.fixture
def rank(board: Board) -> Iterator[Rank]:
    rank = Rank(board)
    yield rank
    rank.pulse.close()


def test_a_step_lasts_from_the_end_of_the_one_before(rank: Rank) -> None:
    rank.pulse.step_begins(0)
    assert rank.beat.phase == Phase.FIRST_STEP
    rank.now_s = 4.0
    rank.pulse.step_ends(1)
    assert (rank.beat.phase, rank.beat.step, rank.beat.step_s, rank.beat.own_s) == (Phase.TRAINING, 1, 4.0, 4.0)
    rank.now_s = 5.0  # the wait for a batch
    rank.pulse.step_begins(1)
    rank.now_s, rank.waited_s = 8.0, 1.5
    rank.pulse.step_ends(2)
    assert (rank.beat.step, rank.beat.step_s, rank.beat.own_s) == (2, 4.0, 2.5)


def test_what_is_between_two_steps_belongs_to_none(rank: Rank) -> None:
    rank.pulse.step_begins(0)
    rank.pulse.step_ends(1)
    with rank.pulse.entered(Phase.SAVING):
        assert rank.beat.phase == Phase.SAVING
        rank.now_s, rank.waited_s = 100.0, 50.0
    assert rank.beat.phase == Phase.TRAINING
    rank.pulse.step_begins(1)
    rank.now_s = 103.0
    rank.pulse.step_ends(2)
    assert (rank.beat.step_s, rank.beat.own_s) == (3.0, 3.0)
    rank.pulse.enter(Phase.VALIDATION)
    rank.now_s = 200.0
    rank.pulse.step_begins(2)
    assert rank.beat.phase == Phase.TRAINING
    rank.now_s = 201.0
    rank.pulse.step_ends(3)
    assert rank.beat.step_s == 1.0


def test_the_first_step_has_its_number_though_its_first_batch_is_none(rank: Rank) -> None:
    for before in (6, 6, 7):  # two batches a step
        rank.pulse.step_begins(before)
        rank.pulse.step_ends(before)
        assert rank.beat.first_step == 7


def test_a_save_that_fails_ends_the_phase_too(rank: Rank) -> None:
    rank.pulse.enter(Phase.BETWEEN)
    with pytest.raises(OSError, match="no room"), rank.pulse.entered(Phase.SAVING):
        raise OSError("no room")
    assert rank.beat.phase == Phase.BETWEEN


def test_without_knowing_the_waits_own_work_is_unknown(board: Board) -> None:
    pulse = Pulse(Board.open(board.path), local_rank=0, round=1)
    pulse.step_begins(0)
    pulse.step_ends(1)
    beat = board.cell(0).read()
    assert beat is not None
    assert math.isnan(beat.own_s)
    assert beat.step_s >= 0
    pulse.close()


def test_nothing_is_written_once_it_is_closed(rank: Rank) -> None:
    rank.pulse.close()
    rank.pulse.close()
    rank.pulse.enter(Phase.TRAINING)
    rank.pulse.mark(begun=1, waits=1, what="barrier")
    assert rank.pulse.timeouts == 0
    assert rank.beat.phase == Phase.STARTING


def test_orders_of_this_round_are_heard_and_answered(rank: Rank) -> None:
    assert rank.pulse.order() == Order.NONE
    rank.board.cell(0).order(Order.SNAPSHOT_AND_STOP, 2)
    assert rank.pulse.order() == Order.NONE
    rank.board.cell(0).order(Order.SNAPSHOT_AND_STOP, 1)
    assert rank.pulse.order() == Order.SNAPSHOT_AND_STOP
    before = rank.beat
    rank.pulse.snapshot(8)
    rank.pulse.answer(9)
    assert (rank.beat.snapshot_step, rank.beat.answered_step, rank.beat.beats) == (8, 9, before.beats)
    rank.pulse.close()
    assert rank.pulse.order() == Order.NONE
    rank.pulse.snapshot(10)
    rank.pulse.answer(10)
    assert rank.beat.answered_step == 9


def test_the_environment_says_where_the_board_is(board: Board, tmp_path: Path) -> None:
    assert Pulse.open({}) is None
    pulse = Pulse.open({"HIERDIST_AGENT": str(tmp_path), "LOCAL_RANK": "0", "HIERDIST_ROUND": "4"})
    assert pulse is not None
    board.count_timeouts(3)
    assert (pulse.round, pulse.folder, pulse.timeouts) == (4, tmp_path, 3)
    pulse.close()
    with pytest.raises(LaunchError, match="no cell on the agent's board"):
        Pulse.open({"HIERDIST_AGENT": str(tmp_path), "LOCAL_RANK": "1"})


@pytest.mark.parametrize("why", ["", "rank 3 (host b) hangs"])
def test_the_order_frees_once(rank: Rank, why: str) -> None:
    freed: list[str] = []
    done = threading.Event()

    def free(text: str) -> None:
        freed.append(text)
        done.set()

    watch = ReleaseWatch(rank.pulse.cell, round=1, free=free)
    rank.board.cell(0).order(Order.RELEASE, 1, why)
    assert done.wait(DEADLINE_S)
    watch.close()
    watch.close()
    assert freed == ["the agent of this host ends the round" + (f": {why}" if why else "")]


@pytest.mark.parametrize("order", [(Order.RELEASE, 2), (Order.SNAPSHOT_AND_STOP, 1), (Order.NONE, 1)])
def test_other_orders_free_nobody(rank: Rank, order: tuple[Order, int]) -> None:
    looks = 0
    looked = threading.Event()
    ordered = rank.pulse.cell.ordered

    def count() -> tuple[Order, int]:
        nonlocal looks
        looks += 1
        if looks == 3:
            looked.set()
        return ordered()

    rank.pulse.cell.ordered = count  # type: ignore[method-assign]
    rank.board.cell(0).order(*order)
    freed: list[str] = []
    watch = ReleaseWatch(rank.pulse.cell, round=1, free=freed.append)
    assert looked.wait(DEADLINE_S)
    watch.close()
    assert not freed


def test_the_first_words_are_those_that_count(tmp_path: Path) -> None:
    leave_words(tmp_path, 2, "RuntimeError: " + "x" * 5000, "gloo:all_reduce, number 7")
    leave_words(tmp_path, 2, "another", None)
    path = tmp_path / "words.2.json"
    said = json.loads(path.read_text())
    assert said == {"error": ("RuntimeError: " + "x" * 5000)[:4000], "last_collective": "gloo:all_reduce, number 7"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    leave_words(tmp_path / "gone", 2, "nobody reads it", None)
