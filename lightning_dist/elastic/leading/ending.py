"""Ends tasks for sure.

Before Python 3.12 ``asyncio.wait_for`` may swallow that it is cancelled (python/cpython#86296), and its task goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_S = 0.05


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel them, again and again, until they have ended; what they raise is nobody's concern any more."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=_AGAIN_S)
        await asyncio.gather(*done, return_exceptions=True)
