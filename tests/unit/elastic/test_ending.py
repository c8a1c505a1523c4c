"""Tasks end though one of them swallows that it is cancelled."""

from __future__ import annotations

import asyncio
import contextlib

from lightning_dist.elastic.leading.ending import end_tasks


def test_a_task_that_swallows_its_cancellation_is_cancelled_again() -> None:
    swallowed = []

    async def stubborn() -> None:
        for _ in range(2):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            swallowed.append(1)
        await asyncio.Event().wait()

    async def failing() -> None:
        raise ValueError("nobody's concern")

    async def test() -> None:
        tasks = [asyncio.ensure_future(stubborn()), asyncio.ensure_future(failing())]
        await asyncio.sleep(0)
        await asyncio.wait_for(end_tasks(tasks), 30)
        assert all(task.done() for task in tasks)

    asyncio.run(test())
    assert len(swallowed) == 2
