"""Who leads, by what the endpoints say of themselves."""

from __future__ import annotations

import pytest

from lightning_dist.elastic.leading.messages import Status
from lightning_dist.elastic.leading.succession import Choice, Join, Lead, Wait, choose


def status(host: str, number: int = 0, *, term: int = 0, leads: bool = False) -> Status:
    return Status(host, leads, term, number)


A, B, C = status("a"), status("b"), status("c")


@pytest.mark.parametrize(
    ("statuses", "own", "has_waited", "choice"),
    [
        ([A, None], 0, False, Lead(1)),
        ([None, B], 1, False, Wait("an endpoint before this one may still come")),
        ([None, B], 1, True, Lead(1)),
        ([A, B], 1, True, Wait("it is the turn of a")),
        ([A, B], None, True, Wait("no endpoint leads yet")),
        ([None, None], None, True, Wait("no endpoint answers")),
        ([status("a", 3, term=1, leads=True), B], 1, False, Join(0)),
        ([A, status("b", 3, term=2, leads=True)], 0, False, Join(1)),
        # The leader of round 3 is gone: the next one takes over at once, whatever is before it.
        ([None, status("b", 3, term=1), status("c", 3, term=1)], 1, False, Lead(2)),
        ([None, status("b", 3, term=1), status("c", 3, term=1)], 2, False, Wait("it is the turn of b")),
        # One that was started anew leaves it to those who know the run.
        ([A, status("b", 3, term=1)], 0, True, Wait("it is the turn of b")),
        ([A, status("b", 3, term=1)], 1, True, Lead(2)),
        # So does one that missed a round.
        ([None, status("b", 3, term=1), status("c", 4, term=1)], 1, True, Wait("it is the turn of c")),
        # Two lead after a cut: the newer round counts, then the later leader, then the order.
        ([status("a", 5, term=1, leads=True), status("b", 6, term=2, leads=True), C], 2, False, Join(1)),
        ([status("a", 5, term=1, leads=True), status("b", 5, term=2, leads=True), C], 2, False, Join(1)),
        ([status("a", 5, term=2, leads=True), status("b", 5, term=2, leads=True), C], 2, False, Join(0)),
    ],
)
def test_who_leads(statuses: list[Status | None], own: int | None, has_waited: bool, choice: Choice) -> None:
    assert choose(statuses, own=own, has_waited=has_waited) == choice
