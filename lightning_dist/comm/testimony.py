"""Who is missing: ranks leave word of a failure in the store, and who leaves none is the suspect.

When a rank dies, its neighbours in a collective see an error at once and, by ending, make their own neighbours fail. Each of
them knows only that "a peer" is gone. So every rank that fails posts what it saw and waits a moment for the others: those who
say nothing are dead or stuck, and a rank that raised an error of its own says so.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import torch.distributed as dist


class Testimony:
    """Statements of ranks about a failure, kept in a store.

    Args:
        store: Shared by all ranks; its keys are prefixed here.
        rank: This process's global rank.
        world_size: Number of ranks.
        grace_s: How long to wait for the others' statements, in seconds.
    """

    __test__ = False  # not a test class, whatever its name begins with

    def __init__(self, store: dist.Store, *, rank: int, world_size: int, grace_s: float = 3.0) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._grace_s = grace_s
        self._posted = False

    def post(self, statement: str, *, own_fault: bool = False) -> None:
        """Leave word, once; later calls change nothing. Gives up silently when the store is gone.

        Args:
            statement: What this rank saw.
            own_fault: Whether the failure began here (an exception of the user's code), not at a peer.
        """
        if self._posted:
            return
        self._posted = True
        value = json.dumps({"statement": statement[:500], "own_fault": own_fault})
        _bounded(lambda: self._store.set(_key(self._rank), value), self._grace_s)

    def verdict(self, statement: str, where: Callable[[int], str]) -> str:
        """Post, wait for the others, and say who began it.

        Args:
            statement: What this rank saw.
            where: Turns a rank into words.
        """
        self.post(statement)
        heard: dict[int, dict[str, object]] = {}
        reached = _bounded(lambda: self._collect(heard), 2 * self._grace_s)
        for rank, said in sorted(heard.items()):
            if said["own_fault"]:
                return f"{where(rank)} ended with an error of its own: {said['statement']}."
        silent = [rank for rank in range(self._world_size) if rank != self._rank and rank not in heard]
        if not reached:
            return "The store of the rendezvous does not answer: the process that holds it (rank 0 or the launcher) is lost."
        if not silent:
            return "All ranks report the failure; none is missing."
        return f"Not heard from within {self._grace_s:g} s: {', '.join(where(rank) for rank in silent)}."

    def _collect(self, heard: dict[int, dict[str, object]]) -> None:
        give_up = time.monotonic() + self._grace_s
        while True:
            for rank in range(self._world_size):
                if rank not in heard and rank != self._rank and self._store.check([_key(rank)]):
                    heard[rank] = json.loads(self._store.get(_key(rank)))
            if len(heard) >= self._world_size - 1 or time.monotonic() >= give_up:
                return
            if any(said["own_fault"] for said in heard.values()):
                return
            time.sleep(0.05)


def _key(rank: int) -> str:
    return f"failed/{rank}"


def _bounded(action: Callable[[], object], timeout_s: float) -> bool:
    """Run ``action`` in a thread and wait at most ``timeout_s`` seconds: a store whose server hangs has no deadline.

    Returns:
        Whether it ended without an error.
    """
    succeeded: list[bool] = []

    def run() -> None:
        try:
            action()
        except Exception:  # the store is gone with its server: that is what False says
            return
        succeeded.append(True)

    thread = threading.Thread(target=run, name="hierdist-testimony", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return bool(succeeded)
