"""The watch: hangs are found within their deadline, by the right name, and nothing that is well is called a hang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.detect.board import Beat, Mark
from lightning_dist.elastic.detect.phases import Phase
from lightning_dist.elastic.detect.watch import Hang, Sight, Watch

CONFIG = ElasticConfig(hang_floor_s=30, hang_factor=10, start_s=600, save_s=300, validation_s=120)
LOOK_S = 0.5


class Ranks:
    """Ranks whose clock is in our hand, and the agent that looks at them."""

    def __init__(self, num_ranks: int = 1, *, config: ElasticConfig = CONFIG, phase: Phase = Phase.TRAINING) -> None:
        beat = Beat(pid=1, round=1, step=0, phase=phase, beats=1)
        self.sights = [Sight(replace(beat, pid=10 + index)) for index in range(num_ranks)]
        self.watch = Watch(config)
        self.now_s = 1000.0
        self.look()

    def look(self) -> list[Hang]:
        return self.watch.look(self.sights, self.now_s)

    def pass_s(self, seconds: float, *, every_s: float = LOOK_S) -> list[Hang]:
        """Time passes, the agent looks, and no rank says anything."""
        hangs = []
        for _ in range(round(seconds / every_s)):
            self.now_s += every_s
            hangs += self.look()
        return hangs

    def beat(self, *ranks: int, phase: Phase | None = None, step_s: float | None = None) -> None:
        """These ranks make progress; with ``step_s`` a step is done."""
        for rank in ranks:
            sight = self.sights[rank]
            beat = sight.beat
            assert beat is not None
            beat = replace(beat, beats=beat.beats + 1, phase=beat.phase if phase is None else phase)
            if step_s is not None:
                beat = replace(beat, step=beat.step + 1, step_s=step_s)
            self.sights[rank] = replace(sight, beat=beat)

    def step(self, seconds: float) -> list[Hang]:
        hangs = self.pass_s(seconds, every_s=min(LOOK_S, seconds))
        self.beat(*range(len(self.sights)), step_s=seconds)
        return hangs

    def wait_in(self, what: str, *ranks: int) -> None:
        for rank in ranks:
            self.sights[rank] = replace(self.sights[rank], mark=Mark(begun=5, waits=1, what=what))


def names(hangs: Sequence[Hang]) -> list[int]:
    return [hang.local_rank for hang in hangs]


def test_a_rank_that_stands_still_in_a_step_hangs() -> None:
    ranks = Ranks(2)
    for _ in range(5):
        assert not ranks.step(1.0)
    hangs: list[Hang] = []
    for _ in range(35):
        hangs += ranks.pass_s(1)
        ranks.beat(1, step_s=1.0)
    (hang,) = hangs
    assert (hang.local_rank, hang.deadline_s) == (0, 30)
    assert 30 < hang.silent_s <= 30 + LOOK_S
    assert "training after step 5" in hang.detail


def test_the_deadline_follows_the_slowest_of_the_last_steps() -> None:
    ranks = Ranks()
    ranks.step(20.0)
    for _ in range(3):
        ranks.step(2.0)
        ranks.look()
    assert ranks.watch.training_deadline_s() == 200
    assert not ranks.pass_s(199)
    assert names(ranks.pass_s(2)) == [0]
    for _ in range(20):
        ranks.step(2.0)
        ranks.look()
    assert ranks.watch.training_deadline_s() == 30


def test_a_pause_of_ten_seconds_is_no_hang() -> None:
    ranks = Ranks(2)
    for _ in range(20):
        assert not ranks.step(0.1)
    assert not ranks.step(10.0)


def test_a_hang_is_told_once_and_again_after_progress() -> None:
    ranks = Ranks()
    assert names(ranks.pass_s(100)) == [0]
    ranks.beat(0)
    assert names(ranks.pass_s(100)) == [0]


@pytest.mark.parametrize(
    ("phase", "deadline_s"),
    [
        (Phase.STARTING, 600),
        (Phase.JOINING, 600),
        (Phase.LOADING, 600),
        (Phase.FIRST_STEP, 600),
        (Phase.TRAINING, 30),
        (Phase.VALIDATION, 120),
        (Phase.BETWEEN, 120),
        (Phase.SAVING, 300),
        (Phase.ENDING, 300),
    ],
)
def test_each_phase_has_its_deadline(phase: Phase, deadline_s: float) -> None:
    ranks = Ranks(phase=phase)
    assert not ranks.pass_s(deadline_s)
    assert names(ranks.pass_s(1)) == [0]


def test_who_is_done_has_no_deadline() -> None:
    assert not Ranks(phase=Phase.DONE).pass_s(10_000)


def test_a_start_is_counted_as_a_whole() -> None:
    ranks = Ranks(phase=Phase.STARTING)
    assert not ranks.pass_s(250)
    ranks.beat(0, phase=Phase.LOADING)
    assert not ranks.pass_s(250)
    ranks.beat(0, phase=Phase.FIRST_STEP)
    assert names(ranks.pass_s(200)) == [0]


def test_a_process_that_never_says_anything_is_found() -> None:
    ranks = Ranks()
    ranks.sights = [Sight(None)]
    assert not ranks.pass_s(600)
    (hang,) = ranks.pass_s(1)
    assert "has said nothing" in hang.detail


def test_a_second_fit_in_the_same_process_starts_anew() -> None:
    ranks = Ranks(phase=Phase.LOADING)
    ranks.pass_s(500)
    ranks.beat(0, phase=Phase.TRAINING)
    ranks.pass_s(1)
    ranks.beat(0, phase=Phase.LOADING)
    assert not ranks.pass_s(599)


def test_no_deadline_is_below_the_floor() -> None:
    config = ElasticConfig(hang_floor_s=50, validation_s=5, save_s=5, start_s=5)
    for phase in (Phase.STARTING, Phase.VALIDATION, Phase.SAVING):
        assert not Ranks(config=config, phase=phase).pass_s(50)


def test_who_waits_for_another_is_not_named() -> None:
    ranks = Ranks(3)
    ranks.wait_in("all_reduce on 'cross'", 0, 2)
    assert names(ranks.pass_s(200)) == [1]


def test_ranks_that_wait_for_another_host_are_left_as_long_as_that_may_take() -> None:
    ranks = Ranks(2)
    ranks.wait_in("all_reduce on 'cross'", 0, 1)
    assert not ranks.pass_s(600)
    hangs = ranks.pass_s(1)
    assert names(hangs) == [0, 1]
    assert "is in all_reduce on 'cross'" in hangs[0].detail
    assert [hang.waits for hang in hangs] == [True, True]


def test_a_process_that_is_stopped_in_a_collective_is_the_one_that_hangs() -> None:
    ranks = Ranks(2)
    ranks.wait_in("all_reduce on 'cross'", 0, 1)
    ranks.sights[1] = replace(ranks.sights[1], is_stopped=True)
    (hang,) = ranks.pass_s(11)
    assert (hang.local_rank, hang.waits) == (1, False)
    assert "its process is stopped; was in all_reduce on 'cross'" in hang.detail


def test_a_process_that_is_stopped_hangs_after_its_own_deadline_in_every_phase() -> None:
    ranks = Ranks(phase=Phase.SAVING)
    assert not ranks.pass_s(200)
    ranks.sights[0] = replace(ranks.sights[0], is_stopped=True)
    assert not ranks.pass_s(9)
    ranks.sights[0] = replace(ranks.sights[0], is_stopped=False)
    assert not ranks.pass_s(1)
    ranks.sights[0] = replace(ranks.sights[0], is_stopped=True)
    assert not ranks.pass_s(10)
    assert names(ranks.pass_s(1)) == [0]


def test_stopping_makes_no_deadline_longer() -> None:
    ranks = Ranks(config=replace(CONFIG, hang_floor_s=2, stopped_s=60))
    ranks.sights[0] = replace(ranks.sights[0], is_stopped=True)
    assert names(ranks.pass_s(3)) == [0]


def test_a_host_that_was_frozen_does_not_wake_to_an_alarm() -> None:
    ranks = Ranks()
    ranks.step(1.0)
    ranks.pass_s(5)
    assert not ranks.pass_s(10_000, every_s=10_000)
    ranks.beat(0)
    assert not ranks.pass_s(25)


def test_a_slow_agent_still_finds_a_hang() -> None:
    ranks = Ranks()
    assert names(ranks.pass_s(80, every_s=20)) == [0]


_PIECES = st.lists(
    st.sampled_from(
        [
            (Phase.TRAINING, 9.9),
            (Phase.TRAINING, 0.3),
            (Phase.TRAINING, 29.0),
            (Phase.VALIDATION, 119.0),
            (Phase.SAVING, 299.0),
            (Phase.BETWEEN, 100.0),
        ]
    ),
    max_size=20,
)


@given(_PIECES, st.sampled_from([0.5, 3.0]))
def test_what_keeps_its_deadlines_is_never_called_a_hang(pieces: list[tuple[Phase, float]], every_s: float) -> None:
    ranks = Ranks(2)
    for phase, seconds in pieces:
        ranks.beat(0, 1, phase=phase)
        ranks.look()
        assert not ranks.pass_s(seconds, every_s=every_s)
        ranks.beat(0, 1, phase=Phase.TRAINING, step_s=seconds if phase == Phase.TRAINING else None)


@given(_PIECES, st.sampled_from([each for each in Phase if each not in (Phase.DONE, Phase.WAITING)]))
def test_whatever_was_before_a_hang_is_found(pieces: list[tuple[Phase, float]], last: Phase) -> None:
    ranks = Ranks(2)
    for phase, seconds in pieces:
        ranks.beat(0, 1, phase=phase, step_s=seconds if phase == Phase.TRAINING else None)
        ranks.look()
    ranks.beat(1, phase=last)
    found: list[int] = []
    for _ in range(62):
        ranks.beat(0)
        found += names(ranks.pass_s(10, every_s=1.0))
    assert found == [1]
