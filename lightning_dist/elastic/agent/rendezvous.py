"""Torch's rendezvous over a session: who trains together is the leader's decision, and comes as a round.

Each agent opens a store before it says that it is ready, at an address of its own and a port that the kernel gives it;
that of the round's first host is where the ranks meet. So no rank has to win a port, what an earlier round has left is
never met, and no agent asks another one anything, who might be dead by then.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from lightning_dist.elastic.rounds import Round
from lightning_dist.elastic.session import End, Session, Stop

_POLL_S = 0.02


class RunEnded(Exception):  # it is no error
    """The leader, or a signal, has ended the run."""

    def __init__(self, end: End) -> None:
        super().__init__(end.reason)
        self.end = end


class SessionRendezvous(RendezvousHandler):
    """Waits for rounds.

    Args:
        session: Leads to the leader.
        host: This host's name.
        address: Under which the others reach it.
        num_ranks: How many ranks run here.
        next_order: An order, if there is one within so many seconds.
    """

    def __init__(
        self,
        session: Session,
        *,
        host: str,
        address: str,
        num_ranks: int,
        next_order: Callable[[float], Stop | End | None],
    ) -> None:
        self._session = session
        self._host = host
        self._address = address
        self._num_ranks = num_ranks
        self._next_order = next_order
        self._store: TCPStore | None = None
        self._is_closed = False
        self.round: Round | None = None
        """The newest."""
        self.heard_ns = 0
        """When it was heard of, on the host's monotonic clock."""

    @property
    def master(self) -> tuple[str, int]:
        """Address and port at which the newest round's ranks meet."""
        assert self.round is not None
        first = self.round.seats[0]
        return first.address, first.store_port

    def get_backend(self) -> str:
        """See torch."""
        return "hierdist"

    @property
    def use_agent_store(self) -> bool:
        """Ranks meet at a store that an agent keeps."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Say that this host is ready, and wait for the next round that it is in.

        Raises:
            RunEnded: There is none any more.
        """
        self._store = open_store(self._address)
        self._session.ready(self._num_ranks, self._store.port)
        found = self._wait_for_round()
        self.round, self.heard_ns = found, time.monotonic_ns()
        rank = [seat.host for seat in found.seats].index(self._host)
        return RendezvousInfo(self._store, rank, len(found.seats), RendezvousStoreInfo(*self.master))

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
        """Close the store. Safe to call twice."""
        self._store = None
        self._is_closed = True
        return True


def open_store(address: str) -> TCPStore:
    """A store that listens at this address only, at a port that was free."""
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        port = server.getsockname()[1]
        return TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach(), use_libuv=True
        )
