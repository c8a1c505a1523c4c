"""How the ranks of a host read a checkpoint once for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lightning_dist.build.run import RunContext
from lightning_dist.comm.agreement import Agreement
from lightning_dist.comm.host_relay import HostRelay, open_host_relay
from lightning_dist.config import SyncConfig

_SLOT_BYTES = 16 << 20  # a chunk, as checkpoints have them by default


@contextmanager
def open_host_reading(
    run: RunContext | None, sync: SyncConfig, agreement: Agreement | None
) -> Iterator[HostRelay | None]:
    """The ranks of this host, connected for a load inside the body; every rank calls it.

    Args:
        run: Of these ranks; ``None`` outside of one.
        sync: Deadline, and whether ranks may share memory.
        agreement: By which all ranks meet; ``None`` for one rank.

    Returns:
        ``None`` where a rank reads for itself: it is alone on its host.
    """
    if agreement is not None:
        agreement.exchange(0)  # who is lost by now is found at once; by the handshake, only at its deadline
    relay = _open(run, sync) if run is not None else None
    if relay is None:
        yield None
        return
    try:
        yield relay
    except BaseException as error:
        relay.close(f"{type(error).__name__}: {error}")
        raise
    relay.close()


def _open(run: RunContext, sync: SyncConfig) -> HostRelay | None:
    collectives = run.collectives.blocking_host()
    attempts = run.own_store("reading")
    with collectives.opening("opening a checkpoint's readers", run.world):
        return open_host_relay(
            run.cluster,
            collectives=collectives,
            store=dist.PrefixStore(f"{attempts.add(f'attempts/{run.rank}', 1)}/", attempts),
            timeout_s=sync.timeout_s,
            slot_bytes=_SLOT_BYTES,
            shares_memory=sync.shared_memory == "auto",
            label="reading",
        )
