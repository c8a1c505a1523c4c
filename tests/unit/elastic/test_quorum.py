"""Of the two sides of a cut at most one goes on, whoever is dead, and whoever led."""

from __future__ import annotations

from itertools import combinations

import pytest

from lightning_dist.elastic.policy.quorum import Ruling, Side, explain, rule

HOSTS = ("a", "b", "c", "d")


def side(present: str, *, last: str = "abcd", dead: str = "", leader: str = "a", max_hosts: int = 4) -> Side:
    return Side(last, present, dead, leader in present, max_hosts)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (side("abc"), Ruling.MAY_START),
        (side("bcd"), Ruling.MAY_START),  # the leader is on the other side, and alone there
        (side("ab"), Ruling.MAY_START),  # half, with the leader
        (side("cd"), Ruling.MUST_WAIT),
        (side("a"), Ruling.MUST_WAIT),
        (side("cd", dead="ab"), Ruling.MAY_START),
        (side("cd", dead="a"), Ruling.MAY_START),  # two of three
        (side("b", last="ab"), Ruling.MUST_WAIT),
        (side("b", last="ab", dead="a"), Ruling.MAY_START),
        (side("b", last="abc", dead="a"), Ruling.MUST_WAIT),  # one of two, and the leader is dead
        (side("x", last="ab", dead="ab"), Ruling.MAY_START),
        (side("bx", last="abc"), Ruling.MUST_WAIT),  # a host that was not in the last round does not count
        (side("b", last="ab", dead="b", leader="b"), Ruling.MAY_START),  # it was dead, and is back
    ],
)
def test_what_a_side_may_do(case: Side, expected: Ruling) -> None:
    assert rule(case, has_fence=False) is expected


def test_the_first_round_is_the_first_leaders_or_everybodys() -> None:
    def first(present: str, has_leader: bool) -> Ruling:
        return rule(Side("", present, "", has_leader, 3), has_fence=False)

    assert first("a", True) is Ruling.MAY_START
    assert first("bc", False) is Ruling.MUST_WAIT
    assert first("bcd", False) is Ruling.MAY_START


def test_a_fence_decides_where_counting_does_not() -> None:
    assert rule(side("abc"), has_fence=True) is Ruling.MAY_START
    assert rule(side("d"), has_fence=True) is Ruling.BY_FENCE_LATER
    assert rule(side("cd"), has_fence=True) is Ruling.BY_FENCE


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_two_sides_never_go_on_at_once(size: int) -> None:
    last = HOSTS[:size]
    going = 0
    for dead in (chosen for count in range(size + 1) for chosen in combinations(last, count)):
        living = [host for host in last if host not in dead]
        for left in (chosen for count in range(len(living) + 1) for chosen in combinations(living, count)):
            right = tuple(host for host in living if host not in left)
            for leader in last:
                sides = [Side(last, hosts, dead, leader in hosts, size) for hosts in (left, right) if hosts]
                may = [rule(each, has_fence=False) is Ruling.MAY_START for each in sides]
                assert sum(may) <= 1, (dead, left, right, leader)
                going += sum(may)
    assert going > 0


def test_it_says_who_is_missing_and_what_to_do() -> None:
    assert "c, d cannot be heard" in explain(side("ab"))
    assert "--fence FOLDER" in explain(side("ab"))
    assert "first host of --rendezvous" in explain(Side("", "b", "", False, 2))
