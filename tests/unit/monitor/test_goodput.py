"""Rounds of one run joined, and how much of its time went into steps that stand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.monitor.goodput import between, goodput
from lightning_dist.monitor.record import RunRecord
from lightning_dist.monitor.rounds import WholeRun, in_order, limits
from tests.support.records import STARTED_NS
from tests.support.rounds import KILLED, made_round


def test_a_run_without_faults_loses_only_what_lies_between_its_steps() -> None:
    of = goodput(WholeRun((made_round(1, range(8), at_s=0, begins_s=2.0),)))
    assert (of.wall_s, of.useful_s, of.repeated_s, of.between_s) == (10.0, 8.0, 0.0, 2.0)
    assert (of.share, of.steps, of.steps_lost, of.rounds, of.incidents) == (0.8, 8, 0, 1, 0)


def test_steps_done_again_are_not_useful() -> None:
    rounds = (made_round(1, range(10), at_s=0), made_round(2, range(7, 12), at_s=13, begins_s=2.0))
    of = goodput(WholeRun(rounds))
    assert (of.useful_s, of.repeated_s, of.wall_s) == (12.0, 3.0, 20.0)
    assert of.between_s == 5.0
    assert (of.steps, of.steps_lost) == (12, 3)


def test_steps_that_a_killed_rank_could_not_write_were_done_if_the_next_round_goes_on_from_them() -> None:
    rounds = (made_round(1, range(6), at_s=0, step_s=0.5), made_round(2, range(8, 10), at_s=6, step_s=0.5))
    of = goodput(WholeRun(rounds))
    assert (of.steps, of.useful_s) == (10, 5.0), "steps 6 and 7, with the round's median"
    late = (rounds[0], made_round(2, range(100, 102), at_s=6, step_s=0.5))
    assert goodput(WholeRun(late)).useful_s == 3.0 + 3.0 + 1.0, "never more than there was time for"


def test_what_an_incident_says_was_lost_counts_though_no_rank_could_write_it() -> None:
    rounds = (made_round(1, range(8), at_s=0), made_round(2, range(8, 10), at_s=13))
    of = goodput(WholeRun(rounds, (KILLED,)))
    assert (of.steps_lost, of.repeated_s, of.incidents) == (2, 2.0, 1)
    assert between((KILLED, KILLED)) == {name: 2 * seconds for name, seconds in KILLED.seconds.items()}


def test_the_newest_round_counts_whatever_lies_before() -> None:
    """The second round comes further than the third goes back to: all of it after that is done again."""
    rounds = (
        made_round(1, range(10), at_s=0),
        made_round(2, range(8, 14), at_s=12),
        made_round(3, range(6, 16), at_s=20),
    )
    assert limits(rounds) == (6, 6, None)
    of = goodput(WholeRun(rounds))
    assert (of.steps, of.steps_lost) == (6 + 0 + 10, 4 + 6)


def test_a_round_that_did_no_step_takes_time_only() -> None:
    rounds = (made_round(1, range(4), at_s=0), made_round(2, (), at_s=5), made_round(3, range(4, 8), at_s=10))
    of = goodput(WholeRun(rounds))
    assert (of.steps, of.steps_lost, of.useful_s, of.wall_s, of.rounds) == (8, 0, 8.0, 14.0, 3)
    alone = goodput(WholeRun((made_round(1, (), at_s=0),)))
    assert (alone.share, alone.wall_s, alone.steps) == (None, 0.0, 0)


def test_whoever_knows_better_says_when_the_run_began_and_ended() -> None:
    start_s = STARTED_NS / 1e9
    of = goodput(WholeRun((made_round(1, range(8), at_s=0),)), started_s=start_s - 4, ended_s=start_s + 12)
    assert (of.wall_s, of.share) == (16.0, 0.5)


def test_the_verdict_is_about_the_longest_round_under_the_name_of_the_first() -> None:
    rounds = in_order([made_round(3, range(7, 9), at_s=30), made_round(1, range(5), at_s=0),
                       made_round(2, range(3, 9), at_s=10, ranks=4)])  # fmt: skip
    assert [record.facts.round for record in rounds] == [1, 2, 3]
    run = WholeRun(rounds, problems=("a file is torn",))
    assert (run.main.facts.round, run.main.facts.world_size) == (2, 4)
    assert (run.main.facts.run_id, run.main.facts.started) == ("run1", rounds[0].facts.started)
    assert run.main.problems == ("a file is torn",)


def test_rounds_are_joined_on_one_clock() -> None:
    rounds = (made_round(1, range(10), at_s=0), made_round(2, range(7, 12), at_s=13, ranks=1))
    joined = WholeRun(rounds).joined
    assert sorted(joined.ranks) == [0, 1]
    first = joined.ranks[0]
    assert [step.step for step in first.steps] == list(range(12))
    assert first.header.pid == 20, "it is the last process that one would look for"
    starts = [(first.header.wall_ns(step.start_ns) - STARTED_NS) / 1e9 for step in first.steps]
    assert starts == [*range(7), *range(13, 18)]
    assert [span.start_ns for span in first.spans] == [step.start_ns for step in first.steps]
    assert [sample.value for sample in first.samples] == [1.0] * 7 + [2.0] * 5
    assert [step.step for step in joined.ranks[1].steps] == list(range(7)), "it was not there any more"


def plan(cuts: list[tuple[int, int]]) -> tuple[RunRecord, ...]:
    """Rounds of so many steps each, each going back by so many."""
    rounds, at_s, begins = [], 0.0, 0
    for number, (length, back) in enumerate(cuts, 1):
        begins = max(0, begins - back)
        rounds.append(made_round(number, range(begins, begins + length), at_s=at_s, ranks=1))
        begins, at_s = begins + length, at_s + length + 1.0
    return tuple(rounds)


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=6))
def test_each_step_stands_once_and_no_second_is_counted_twice(cuts: list[tuple[int, int]]) -> None:
    rounds = plan(cuts)
    run = WholeRun(rounds)
    of = goodput(run)
    last = rounds[-1].ranks[0].steps[-1].step
    assert of.steps == last + 1
    assert [step.step for step in run.joined.ranks[0].steps] == list(range(last + 1))
    assert of.useful_s + of.repeated_s + of.between_s == pytest.approx(of.wall_s)
    assert of.steps + of.steps_lost == sum(length for length, _ in cuts)


def test_rounds_of_equal_length_the_newest_is_judged() -> None:
    run = WholeRun((made_round(1, range(4), at_s=0), made_round(2, range(4, 8), at_s=9)))
    assert run.main.facts.round == 2
    assert dataclasses.replace(run, rounds=run.rounds[:1]).main.facts.round == 1
