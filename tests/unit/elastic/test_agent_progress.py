"""What the leader hears of a round's progress."""

from __future__ import annotations

from lightning_dist.elastic.agent.progress import Progress
from lightning_dist.elastic.detect.board import Beat
from lightning_dist.elastic.policy.events import FirstStep, Snapshot


def beat(step: int, *, snapshot_step: int = -1, first_step_ns: int = 9_000_000_000) -> Beat:
    return Beat(
        1, 2, step, joined_ns=3_000_000_000, loaded_ns=5_000_000_000, snapshot_step=snapshot_step,
        first_step_ns=first_step_ns, first_step=11 if first_step_ns else -1,
    )  # fmt: skip


def progress() -> Progress:
    return Progress(host="a", round=2, num_ranks=2, began_ns=1_000_000_000)


def test_the_first_step_is_told_once_all_ranks_have_done_it() -> None:
    told = progress()
    assert told.look({}) == []
    assert told.look({0: beat(11)}) == []
    assert told.look({0: beat(11), 1: beat(10, first_step_ns=0)}) == []
    assert told.look({0: beat(13), 1: beat(12, first_step_ns=9_500_000_000)}) == [  # which was a while ago
        FirstStep("a", 2, 11, start_s=2.0, load_s=2.0, first_step_s=4.5)
    ]
    assert told.look({0: beat(14), 1: beat(13)}) == []
    assert told.newest_step == 14


def test_a_snapshot_is_there_once_all_ranks_have_it() -> None:
    told = progress()
    told.look({0: beat(11), 1: beat(11)})
    assert told.look({0: beat(12, snapshot_step=12), 1: beat(12, snapshot_step=7)}) == [Snapshot(2, 7)]
    assert told.look({0: beat(12, snapshot_step=12), 1: beat(12, snapshot_step=12)}) == [Snapshot(2, 12)]
    assert told.look({0: beat(12, snapshot_step=12), 1: beat(12, snapshot_step=12)}) == []
