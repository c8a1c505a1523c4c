"""Calls that storage may hold up for ever, out of the loop's way and with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable
from typing import TypeVar

from lightning_dist.errors import LaunchError

T = TypeVar("T")


async def aside(function: Callable[[], T], *, timeout_s: float, what: str) -> T:
    """Call a function in a thread of its own, which does not keep the process from ending.

    Args:
        function: What to call.
        timeout_s: It is given up after so many seconds; its thread may go on.
        what: Names the call, should it be given up.

    Raises:
        LaunchError: There was no answer in time.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def act() -> None:
        try:
            tell = functools.partial(answer.set_result, function())
        except Exception as error:
            tell = functools.partial(answer.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile: nobody waits
            loop.call_soon_threadsafe(lambda: None if answer.done() else tell())

    threading.Thread(target=act, name="hierdist-storage", daemon=True).start()
    try:
        return await asyncio.wait_for(answer, timeout_s)
    except asyncio.TimeoutError as error:
        raise LaunchError(f"{what}: storage has not answered for {timeout_s:g} s") from error
