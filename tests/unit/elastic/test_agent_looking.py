"""What an agent sees of its ranks, as events."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.agent.looking import Lookout
from lightning_dist.elastic.agent_folder import tell_options
from lightning_dist.elastic.detect.board import Board
from lightning_dist.elastic.detect.phases import Phase
from lightning_dist.elastic.policy.events import Cause, OptionsTold, WorkerFailed


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    board = Board.create(tmp_path / "board", 2)
    yield board
    board.close()


def lookout(folder: Path, board: Board, *, mode: str | None = None) -> Lookout:
    found = Lookout(
        host="b", folder=folder, options=ElasticConfig(mode="restart", hang_floor_s=5.0), mode=mode, say=lambda _: None
    )
    found.begin_round(board, number=3, first_rank=2, began_ns=0)
    return found


def hangs(found: Lookout, until_s: int) -> list[WorkerFailed]:
    events = [event for second in range(until_s) for event in found.look(float(second))]
    return [event for event in events if isinstance(event, WorkerFailed)]


def test_a_rank_without_progress_is_named_by_its_global_rank(tmp_path: Path, board: Board) -> None:
    for local_rank in (0, 1):
        board.cell(local_rank).begin(round=3)
        board.cell(local_rank).write(phase=Phase.TRAINING, step=4, step_s=0.1)
    board.cell(0).write(phase=Phase.DONE)
    (hang,) = hangs(lookout(tmp_path, board), 10)
    assert (hang.host, hang.round, hang.rank, hang.cause) == ("b", 3, 3, Cause.HANG)
    assert hang.silent_s > 5.0
    assert "after step 4" in hang.detail
    assert board.timeouts == 1


def test_a_script_that_never_says_how_far_it_is_does_not_hang(tmp_path: Path, board: Board) -> None:
    assert hangs(lookout(tmp_path, board), 2000) == []


def test_what_ranks_of_an_earlier_round_said_does_not_count(tmp_path: Path, board: Board) -> None:
    board.cell(0).begin(round=2)
    board.cell(0).write(phase=Phase.TRAINING, step=4)
    assert lookout(tmp_path, board).look(0.0) == []


def test_the_scripts_options_are_told_once(tmp_path: Path, board: Board) -> None:
    found = lookout(tmp_path, board)
    assert found.look(0.0) == []
    tell_options(tmp_path, ElasticConfig(mode="degrade", hang_floor_s=7.0))
    assert found.look(1.0) == [OptionsTold(ElasticConfig(mode="degrade", hang_floor_s=7.0))]
    assert found.look(2.0) == []
    assert found.options.hang_floor_s == 7.0


def test_a_mode_on_the_command_line_wins(tmp_path: Path, board: Board) -> None:
    found = lookout(tmp_path, board, mode="restart")
    tell_options(tmp_path, ElasticConfig(mode="off", hang_floor_s=7.0))
    assert found.look(0.0) == [OptionsTold(ElasticConfig(mode="restart", hang_floor_s=7.0))]
