"""Endpoints are asked again and again: whom that has to wait for."""

from __future__ import annotations

import asyncio

import pytest

from lightning_dist.elastic.leading.messages import Status
from lightning_dist.elastic.leading.roll_call import RollCall

A, B = Status("a", False, 1, 3), Status("b", False, 1, 3)
DEADLINE_S = 30.0


class Endpoints:
    """Endpoint 1 answers at once; endpoint 0 once :meth:`answer` says what."""

    def __init__(self) -> None:
        self.calls: list[asyncio.Future[Status | None]] = []

    async def ask(self, index: int) -> Status | None:
        if index == 1:
            return B
        self.calls.append(asyncio.get_running_loop().create_future())
        return await self.calls[-1]

    def answer(self, status: Status | None) -> None:
        self.calls[-1].set_result(status)


async def said(roll: RollCall) -> list[Status | None]:
    return await asyncio.wait_for(roll.statuses(), DEADLINE_S)


def test_all_are_waited_for_until_one_has_not_answered_and_that_one_is_heard_later() -> None:
    async def scene() -> None:
        endpoints = Endpoints()
        async with RollCall(endpoints.ask, 2, moment_s=0.001) as roll:
            first = asyncio.create_task(roll.statuses())
            await asyncio.wait({first}, timeout=0.05)
            assert not first.done()
            endpoints.answer(None)
            assert await first == [None, B]
            assert await said(roll) == [None, B]
            assert await said(roll) == [None, B]
            assert len(endpoints.calls) == 2  # the second goes on
            endpoints.answer(A)
            assert await said(roll) == [A, B]
            assert len(endpoints.calls) == 2
            again = asyncio.create_task(roll.statuses())  # it has answered: it is waited for
            await asyncio.wait({again}, timeout=0.05)
            assert not again.done()
            endpoints.answer(A)
            assert await again == [A, B]

    asyncio.run(scene())


def test_one_that_is_known_to_be_silent_holds_up_nobody_and_its_call_ends_with_the_roll() -> None:
    async def scene() -> Endpoints:
        endpoints = Endpoints()
        async with RollCall(endpoints.ask, 2, moment_s=0.001, silent=[0]) as roll:
            assert await said(roll) == [None, B]
        return endpoints

    (call,) = asyncio.run(scene()).calls
    assert call.cancelled()


def test_an_answer_that_is_an_error_is_raised() -> None:
    async def ask(index: int) -> Status | None:
        raise ValueError(f"of {index}")

    async def scene() -> None:
        async with RollCall(ask, 2, moment_s=0.001) as roll:
            await roll.statuses()

    with pytest.raises(ValueError, match="of 0"):
        asyncio.run(scene())
