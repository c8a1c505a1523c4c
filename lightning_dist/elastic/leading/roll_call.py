"""Asks all endpoints again and again, without waiting each time for those that are silent.

A host that is cut off or without power does not refuse a call: the call waits until it is given up. So an endpoint that
has not answered is waited for only a moment longer than the others. The call to it goes on meanwhile, and is heard the
next time: a host that answers slowly is not taken for a silent one for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from lightning_dist.elastic.leading.ending import end_tasks
from lightning_dist.elastic.leading.messages import Status


class RollCall:
    """See the module. All calls are made in the loop's thread.

    Args:
        ask: Asks one endpoint, by its index; ``None``: it does not answer.
        size: Number of endpoints.
        moment_s: For how long those are waited for that have not answered, in seconds.
        silent: Endpoints that are known not to answer.
    """

    def __init__(
        self,
        ask: Callable[[int], Coroutine[Any, Any, Status | None]],
        size: int,
        *,
        moment_s: float,
        silent: Collection[int] = (),
    ) -> None:
        self._ask = ask
        self._size = size
        self._moment_s = moment_s
        self._silent = set(silent)
        self._calls: dict[int, asyncio.Task[Status | None]] = {}

    async def __aenter__(self) -> RollCall:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.end()

    async def statuses(self) -> list[Status | None]:
        """What each endpoint says; ``None``: nothing, by now."""
        for index in range(self._size):
            if index not in self._calls:
                self._calls[index] = asyncio.create_task(self._ask(index))
        answering = [call for index, call in self._calls.items() if index not in self._silent]
        if answering:
            await asyncio.wait(answering)
        if len(answering) < self._size:
            await asyncio.wait(self._calls.values(), timeout=self._moment_s)
        done = {index: self._calls.pop(index) for index in range(self._size) if self._calls[index].done()}
        answers = dict(zip(done, await asyncio.gather(*done.values()), strict=True))
        found = [answers.get(index) for index in range(self._size)]
        self._silent = {index for index, status in enumerate(found) if status is None}
        return found

    async def end(self) -> None:
        """Give up calls that have not been answered. Safe twice."""
        calls, self._calls = self._calls, {}
        await end_tasks(calls.values())
