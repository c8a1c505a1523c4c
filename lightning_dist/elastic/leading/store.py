"""The agents' store of a round: fresh for each, in the leader's process, on the address that it is reached by."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore

_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class RoundStore:
    """A store that lives as long as this object; who still calls it afterwards gets an error at once."""

    store: TCPStore
    port: int


def open_store(address: str) -> RoundStore:
    """Serve one on a free port of an address, and on no other.

    Torch's own listener would take calls on all addresses of the host, so it is given one.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=4096)
    port = int(listener.getsockname()[1])
    store = TCPStore(
        address,
        port,
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return RoundStore(store, port)
