"""How often to save: the choice by what is measured, and its pace."""

from __future__ import annotations

import itertools

import pytest

from lightning_dist.laws import daly_interval_s, lost_time_share
from lightning_dist.planning.save_interval import FIRST_STEPS, Measured, SavePace, choose_interval

HOUR_S = 3600.0


@pytest.mark.parametrize(("mtbf_h", "minutes"), [(24.0, 117), (6.0, 57), (0.25, 9.1)])
def test_the_law_gives_what_its_paper_does(mtbf_h: float, minutes: float) -> None:
    """Daly 2006, figures 3 to 5: a dump of five minutes."""
    assert daly_interval_s(300, mtbf_h * HOUR_S) / 60 == pytest.approx(minutes, rel=0.02)
    assert choose_interval(Measured(300, 0, 60), mtbf_h * HOUR_S).steps == pytest.approx(minutes, rel=0.02)


def test_no_other_interval_loses_less() -> None:
    measured = Measured(hold_s=2.0, write_s=10.0, step_s=0.5)
    chosen = choose_interval(measured, 8 * HOUR_S, restart_s=120)

    def lost(steps: int) -> float:
        return lost_time_share(steps * 0.5, 2.0, 8 * HOUR_S, restart_s=120)

    assert chosen.lost_share == lost(chosen.steps)
    assert chosen.lost_share <= min(map(lost, range(20, 4000))) + 1e-6
    without = choose_interval(measured, 8 * HOUR_S)
    assert without.steps == chosen.steps
    assert without.lost_share < chosen.lost_share


def test_no_interval_is_shorter_than_a_write_or_a_step() -> None:
    assert choose_interval(Measured(0.001, 90.0, 1.0), 60.0).steps == 90
    assert choose_interval(Measured(0.001, 0.0, 100.0), 60.0).steps == 1


def test_what_was_chosen_is_said_in_words() -> None:
    text = str(choose_interval(Measured(0.5, 4.0, 0.25), 10 * HOUR_S))
    assert "every 758 steps (190 s)" in text
    assert "expected every 10 h; expected lost time: 0.53%" in text


def test_two_saves_come_first_and_the_second_is_measured() -> None:
    now_s = 0.0
    pace = SavePace(HOUR_S, clock=lambda: now_s)
    pace.begin(100)
    saves, said = [], []
    for step in range(101, 1000):
        now_s += 2.0
        pace.step_ended(step)
        if not pace.is_due(step):
            continue
        hold_s = 30.0 if not saves else 5.0  # the first makes room
        now_s += hold_s
        saves.append(step)
        measured = pace.saved(step, hold_s=hold_s, wait_s=1.0, write_s=3.0, is_skipped=False)
        if measured is not None:
            assert measured == pytest.approx(Measured(4.0, 3.0, 2.0))
            said.append(pace.settle(measured))
    steps = choose_interval(Measured(4.0, 3.0, 2.0), HOUR_S).steps
    assert saves[:3] == [100 + FIRST_STEPS, 100 + 2 * FIRST_STEPS, 100 + 2 * FIRST_STEPS + steps]
    assert {later - earlier for earlier, later in itertools.pairwise(saves[1:])} == {steps}
    assert said[0] is not None
    assert set(said[1:]) == {None}


@pytest.mark.parametrize(("factor", "is_revised"), [(1.5, False), (2.2, True), (0.7, False), (0.4, True)])
def test_it_is_revised_when_the_cost_has_doubled_or_halved(factor: float, is_revised: bool) -> None:
    pace = SavePace(HOUR_S, clock=lambda: 0.0)
    first = pace.settle(Measured(1.0, 0.0, 0.1))
    again = pace.settle(Measured(factor, 0.0, 0.1))
    assert (again is not None) == is_revised
    assert pace.interval == (again or first)


def test_a_skipped_save_is_asked_for_again_and_not_measured() -> None:
    pace = SavePace(HOUR_S, clock=lambda: 0.0)
    pace.step_ended(1)
    assert pace.saved(10, hold_s=0.0, wait_s=0.0, write_s=0.0, is_skipped=True) is None
    assert not pace.is_due(10 + FIRST_STEPS - 1)
    assert pace.is_due(10 + FIRST_STEPS)
    assert pace.interval is None
