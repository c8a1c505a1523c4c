"""A host is checked before it joins, and again."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lightning_dist.elastic.agent.fitness import CHECKS, prove_fit
from lightning_dist.elastic.agent.host_parts import HostParts
from lightning_dist.elastic.policy.events import HostUnhealthy
from lightning_dist.elastic.session import End, Stop

AGAIN_S = 1e-3


class Orders:
    """Gives what it was made with, one after the other."""

    def __init__(self, *orders: Stop | End, leaving: End | None = None) -> None:
        self.leaving = leaving
        self._orders = list(orders)

    def next(self, timeout_s: float) -> Stop | End | None:
        return self._orders.pop(0) if self._orders else None


def make_parts(orders: Orders, said: list[str], told: list[Any]) -> HostParts:
    session = SimpleNamespace(tell=told.append, told=lambda timeout_s: True)
    return cast(HostParts, SimpleNamespace(host="b", orders=orders, session=session, say=said.append))


def checks(*found: str | None) -> Callable[[], str | None]:
    return iter(found).__next__


def test_a_host_that_is_well_has_nothing_to_say() -> None:
    said: list[str] = []
    assert prove_fit(make_parts(Orders(), said, []), checks(None)) is None
    assert said == []


def test_what_passes_is_said_and_no_reason_to_end() -> None:
    said: list[str] = []
    told: list[Any] = []
    assert prove_fit(make_parts(Orders(), said, told), checks("link", "link", None), again_s=AGAIN_S) is None
    assert [f"{left} times at most" in line for left, line in zip((3, 2), said, strict=True)] == [True, True]
    assert told == []


def test_what_stays_ends_the_host_and_the_leader_hears_it() -> None:
    said: list[str] = []
    told: list[Any] = []
    parts = make_parts(Orders(), said, told)
    assert prove_fit(parts, checks(*["disk"] * CHECKS), again_s=AGAIN_S) == End(
        1, "this host is not fit to train: disk"
    )
    assert told == [HostUnhealthy("b", "disk")]
    assert len(said) == CHECKS - 1


@pytest.mark.parametrize(
    "orders",
    [Orders(Stop(1, "old news"), End(3, "over")), Orders(leaving=End(3, "over"))],
    ids=["the run ends", "told to leave"],
)
def test_nothing_is_waited_for_once_the_end_is_known(orders: Orders) -> None:
    assert prove_fit(make_parts(orders, [], []), checks("link"), again_s=600.0) == End(3, "over")
