"""Torch's rendezvous over a session: who trains together is the leader's decision, and comes as a round.

The agent of the round's first host opens a store for the ranks, at an address of its own and a port that the kernel
gives it, and tells the others through the store of the agents. So no rank has to win a port, and what an earlier round
has left is never met.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from lightning_dist.elastic.rounds import Round
from lightning_dist.elastic.session import End, Session, Stop

_MASTER_KEY = "hierdist/ranks_store"
_STORE_S = 10.0  # to reach the agents' store, in seconds
_POLL_S = 0.02


class RunEnded(Exception):  # it is no error
    """The leader, or a signal, has ended the run."""

    def __init__(self, end: End) -> None:
        super().__init__(end.reason)
        self.end = end


class RoundBroken(Exception):  # another round follows
    """A round was over before its ranks were started."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


class SessionRendezvous(RendezvousHandler):
    """Waits for rounds.

    Args:
        session: Leads to the leader.
        host: This host's name.
        address: Under which the others reach it.
        next_order: An order, if there is one within so many seconds.
    """

    def __init__(
        self, session: Session, *, host: str, address: str, next_order: Callable[[float], Stop | End | None]
    ) -> None:
        self._session = session
        self._host = host
        self._address = address
        self._next_order = next_order
        self._ranks_store: TCPStore | None = None
        self._is_closed = False
        self.round: Round | None = None
        """The newest."""
        self.master = ("", 0)
        """Address and port of its ranks' store."""
        self.heard_ns = 0
        """When it was heard of, on the host's monotonic clock."""

    def get_backend(self) -> str:
        """See torch."""
        return "hierdist"

    @property
    def use_agent_store(self) -> bool:
        """Ranks meet at a store that an agent keeps."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round that this host is in.

        Raises:
            RunEnded: There is none any more.
            RoundBroken: It was over before all its agents had met.
        """
        found = self._wait_for_round()
        self.round, self.heard_ns = found, time.monotonic_ns()
        rank = [seat.host for seat in found.seats].index(self._host)
        store = self._open_store(found)
        if rank == 0:
            self._ranks_store = open_store(self._address)
            store.set(_MASTER_KEY, f"{self._address}|{self._ranks_store.port}")
        while not self._check(store, found):
            self._obey(self._next_order(_POLL_S), found)
        address, _, port = store.get(_MASTER_KEY).decode().rpartition("|")
        self.master = (address, int(port))
        return RendezvousInfo(store, rank, len(found.seats), RendezvousStoreInfo(*self.master))

    def _wait_for_round(self) -> Round:
        while True:
            order = self._next_order(0.0)
            if isinstance(order, End):
                raise RunEnded(order)
            found = self._session.next_round(_POLL_S)
            if isinstance(found, End):
                raise RunEnded(found)
            if found is not None:
                return found

    def _open_store(self, found: Round) -> Store:
        timeout = timedelta(seconds=_STORE_S)
        try:
            return TCPStore(found.store_address, found.store_port, is_master=False, timeout=timeout)
        except (DistError, RuntimeError) as error:
            raise RoundBroken(found.number, f"the agents' store is gone: {error}") from error

    def _check(self, store: Store, found: Round) -> bool:
        try:
            return bool(store.check([_MASTER_KEY]))
        except (DistError, RuntimeError) as error:
            raise RoundBroken(found.number, f"the agents' store is gone: {error}") from error

    def _obey(self, order: Stop | End | None, found: Round) -> None:
        if isinstance(order, End):
            raise RunEnded(order)
        if isinstance(order, Stop) and order.number >= found.number:
            raise RoundBroken(found.number, order.reason)

    def is_closed(self) -> bool:
        """See torch."""
        return self._is_closed

    def set_closed(self) -> None:
        """See torch."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """Always 0: when a host is to be taken in, the leader ends the round."""
        return 0

    def get_run_id(self) -> str:
        """The run's name."""
        return "" if self.round is None else self.round.run

    def shutdown(self) -> bool:
        """Close the ranks' store. Safe to call twice."""
        self._ranks_store = None
        self._is_closed = True
        return True


def open_store(address: str) -> TCPStore:
    """A store that listens at this address only, at a port that was free."""
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        port = server.getsockname()[1]
        return TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach(), use_libuv=True
        )
