"""The store of torchrun's agent, free of what an earlier start of the ranks has left in it.

torch 2.13 gives the ranks of each start a new store, but not under the static rendezvous, which is torchrun's default:
there it keeps the one it has, and ranks find addresses of dead ones under the keys of the living.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

_FIRST = "hierdist/first-start"


def open_agent_store(environ: Mapping[str, str], *, timeout: timedelta) -> dist.Store | None:
    """What ranks meet in. ``None``: no agent of torchrun's holds a store.

    Args:
        environ: Environment variables.
        timeout: Of the store's calls.
    """
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = dist.TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    return of_start(store, environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def of_start(store: dist.Store, start: str) -> dist.Store:
    """The store itself for the start whose ranks come first, a part of it for each later one; alike on all ranks."""
    is_first = store.compare_set(_FIRST, "", start).decode() == start
    return store if is_first else dist.PrefixStore(f"hierdist/start-{start}", store)
