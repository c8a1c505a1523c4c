"""The agent's :class:`~lightning_dist.elastic.session.Session`: a thread whose event loop talks to the leader."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from lightning_dist.elastic.leading.ending import end_tasks
from lightning_dist.elastic.leading.inbox import Inbox
from lightning_dist.elastic.leading.node import Node
from lightning_dist.elastic.policy.events import Event, HostReady
from lightning_dist.elastic.rounds import Round
from lightning_dist.elastic.session import End, Stop


class SocketSession:
    """See the module. Safe to call from any thread.

    Args:
        host: Name of this host.
        node: What runs in the thread.
        inbox: Where the node puts what the leader wants.
    """

    def __init__(self, host: str, node: Node, inbox: Inbox) -> None:
        self._host = host
        self._node = node
        self._inbox = inbox
        self._run: str | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="hierdist-session")
        self._thread.start()

    @property
    def run(self) -> str | None:
        """Name of the run; ``None`` before the first round."""
        return self._run

    def ready(self, num_ranks: int, store_port: int = 0) -> None:
        """See the protocol, also for the other calls."""
        self.tell(HostReady(self._host, num_ranks, store_port))

    def next_round(self, timeout_s: float) -> Round | End | None:  # noqa: D102
        taken = self._inbox.take_round(timeout_s)
        if isinstance(taken, Round):
            self._run = taken.run
        return taken

    def tell(self, event: Event) -> None:  # noqa: D102
        self._call(self._node.tell, event)

    def told(self, timeout_s: float) -> bool:  # noqa: D102
        return self._node.has_leader.wait(timeout_s)

    def order(self) -> Stop | End | None:  # noqa: D102
        return self._inbox.take_order()

    def leave(self, reason: str) -> None:  # noqa: D102
        self._call(self._node.leave, reason)
        self._thread.join()

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens any more, and an End says why
            self._loop.call_soon_threadsafe(function, *args)

    def _main(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._node.run())
        except Exception as error:
            self._inbox.put_order(End(1, f"the connection to the leader failed: {type(error).__name__}: {error}"))
        finally:
            loop.run_until_complete(_cancel_what_is_left(loop))
            loop.run_until_complete(loop.shutdown_default_executor())
            asyncio.set_event_loop(None)
            loop.close()


async def _cancel_what_is_left(loop: asyncio.AbstractEventLoop) -> None:
    """Such as a call that came in the last moment."""
    await end_tasks(task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task())
