"""Whether ranks ask for the same operation, found out before any data moves.

Backends do not check it. Where sizes differ, Gloo ends the process (SIGABRT, from a thread of its own); where only
types differ, bytes of one type are added to bytes of another, silently.

An operation that follows the same operation as before is taken for agreed, so a training step repeats the check of its
first occurrence at no cost. Any other is compared with rank 0's, by one key in the store: rank 0 only writes, so it
waits for nobody, and a rank that differs fails before it sends.
"""

from __future__ import annotations

import datetime
import time

import torch
import torch.distributed as dist

from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.errors import CollectiveMismatchError, PeerLostError

_LOOK_UP_S = 0.5  # how often a long wait looks for an alarm


class SignatureCheck:
    """Compares what ranks ask for; every rank calls :meth:`check` before each operation, in the same order.

    Args:
        store: Shared by all ranks; its keys are prefixed by the caller, and nobody else uses this connection.
        collectives: The seam.
        world_size: Number of ranks.
    """

    def __init__(self, store: dist.Store, *, collectives: Collectives, world_size: int) -> None:
        self._store = store
        self._collectives = collectives
        self._group = RankGroup(tuple(range(world_size)), collectives.rank, None, "signatures", "world")
        self._agreed: set[tuple[str, str]] = set()
        self._previous = ""
        self._count = 0

    def check(self, tensor: torch.Tensor, *, mean: bool) -> None:
        """Make sure that rank 0 asks for the same.

        Raises:
            CollectiveMismatchError: It asks for another size, type or operation.
            CollectiveTimeoutError: It did not get here within the deadline.
            PeerLostError: The store is gone.
        """
        kind = str(tensor.dtype).removeprefix("torch.")
        signature = f"the {'mean' if mean else 'sum'} of {tensor.numel()} x {kind}"
        pair, number = (self._previous, signature), self._count
        self._previous, self._count = signature, self._count + 1
        if pair not in self._agreed:
            self._compare(number, signature)
            self._agreed.add(pair)

    def _compare(self, number: int, signature: str) -> None:
        collectives = self._collectives
        with (
            collectives.translated("all_reduce", self._group),
            collectives.activity.waiting("a comparison with rank 0"),
        ):
            if collectives.rank == 0:
                self._store.set(str(number), signature)
                return
            self._wait_for(str(number))
            wanted = self._store.get(str(number)).decode()
        if wanted != signature:
            raise collectives.own_failure(
                CollectiveMismatchError(
                    f"{collectives.where(collectives.rank)} asks for {signature} as operation {number} (all_reduce), "
                    f"{collectives.where(0)} for {wanted}: the ranks' models or their order of gradients differ"
                )
            )

    def _wait_for(self, key: str) -> None:
        """Wait until the deadline or the testimony's alarm: rank 0 may have raised before it came here."""
        collectives, start_s = self._collectives, time.monotonic()
        while True:
            waited_s = time.monotonic() - start_s
            left_s = collectives.timeout_s - waited_s
            try:
                self._store.wait([key], datetime.timedelta(seconds=max(0.001, min(left_s, _LOOK_UP_S))))
                return
            except dist.DistStoreError as error:
                if left_s <= _LOOK_UP_S:
                    raise
                alarm = collectives.testimony.alarm(waited_s) if collectives.testimony is not None else None
                if alarm is not None:
                    raise PeerLostError(f"waited {waited_s:.1f} s for rank 0, then gave up: {alarm}") from error
