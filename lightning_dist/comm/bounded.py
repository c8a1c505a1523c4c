"""What may never come back, in a thread of its own, so that who waits for it can give up.

A store needs it: where the process that holds it is stopped, no call comes back, whatever the call's timeout; where
that process has died, a new connection is tried for a multiple of its timeout.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch.distributed as dist

from lightning_dist.errors import CollectiveTimeoutError

LOOK_UP_S = 0.5
"""How often a long wait looks whether there is a reason to give up, in seconds."""

_Result = TypeVar("_Result")


class Bounded(Generic[_Result]):
    """An action that has begun in a thread, which nobody need wait out.

    Args:
        action: What to do.
        name: The thread's.
    """

    def __init__(self, action: Callable[[], _Result], *, name: str) -> None:
        self._results: list[_Result] = []
        self._failures: list[Exception] = []
        # The thread lets go of the action at its end: what the action refers to (connections) goes when it should.
        self._thread = threading.Thread(target=self._run, args=(action,), name=name, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    def result(self, timeout_s: float, *, look: Callable[[float], None] | None = None) -> _Result:
        """What the action returned.

        Args:
            timeout_s: How long to wait, in seconds.
            look: Called now and then with the seconds waited; what it raises ends the wait.

        Raises:
            TimeoutError: The action has not ended; its thread goes on.
            Exception: What the action raised.
        """
        if not self.ends(timeout_s, look=look):
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        if self._failures:
            raise self._failures[0]
        return self._results[0]

    def ends(self, timeout_s: float, *, look: Callable[[float], None] | None = None) -> bool:
        """Whether the action ends, well or not, within ``timeout_s`` seconds; ``look`` as in :meth:`result`."""
        start_s = time.monotonic()
        while self._thread.is_alive():
            waited_s = time.monotonic() - start_s
            if waited_s >= timeout_s:
                return False
            if look is not None and waited_s >= LOOK_UP_S:
                look(waited_s)
            self._thread.join(min(timeout_s - waited_s, LOOK_UP_S))
        return True

    def succeeds(self, timeout_s: float) -> bool:
        """Whether the action ends without an error within ``timeout_s`` seconds; :meth:`result` then has no wait."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and bool(self._results)

    def _run(self, action: Callable[[], _Result]) -> None:
        try:
            self._results.append(action())
        except Exception as error:  # raised again in the thread that waits
            self._failures.append(error)


def comes(store: dist.Store, key: str, timeout_s: float) -> bool:
    """Whether a key is set within ``timeout_s`` seconds.

    Raises:
        RuntimeError: The store is gone.
    """
    try:
        store.wait([key], datetime.timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        return False
    except RuntimeError as error:  # FileStore raises the plain kind
        if str(error) != "Wait timeout":
            raise
        return False
    return True


def own_connection(store: dist.Store, timeout_s: float, *, look: Callable[[float], None] | None = None) -> dist.Store:
    """Another connection to a store, for a thread that waits in it.

    Args:
        store: Its prefixes stay.
        timeout_s: How long connecting may take, in seconds.
        look: See :meth:`Bounded.result`.

    Raises:
        CollectiveTimeoutError: The store's process did not answer in time.
        torch.distributed.DistError: The store's process is gone.
    """
    clone: Callable[[], dist.Store] = store.clone  # type: ignore[attr-defined]  # missing in torch's stub
    try:
        return Bounded(clone, name="hierdist-connection").result(timeout_s, look=look)
    except TimeoutError as error:
        raise CollectiveTimeoutError(
            f"the store of the rendezvous did not take a new connection within {timeout_s:g} s"
        ) from error
