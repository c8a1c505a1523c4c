"""Freeing threads that are blocked in a backend's operation, from another thread of the process.

Note: Gloo has no abort.
    ``ProcessGroupGloo.abort`` and ``shutdown`` (torch 2.13) return at once and free nobody; a blocked operation ends
    with its deadline or with the peer's process. But a receive whose wait times out closes all connections of its
    group, since what comes later could not be told from what comes next. So a receive of a tag that nobody sends, with
    a deadline of a millisecond, frees whoever is blocked in that group, here and at the peers. NCCL has an abort, which
    must be called for all groups inside one bracket, else two of them may wait for each other
    (https://github.com/pytorch/pytorch/issues/119797).

The groups cannot be used any more afterwards; destroy them.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

_AT_ONCE = datetime.timedelta(milliseconds=1)
_UNSENT_TAG = 0x7EAD  # nobody else's


class Abortable(Protocol):
    """What is used of ``ProcessGroupNCCL``, which is there only where torch was built with NCCL."""

    def abort(self) -> None:
        """End its operations, those on the device too."""

    def _group_start(self) -> None: ...

    def _group_end(self) -> None: ...


def free_groups() -> None:
    """Make every operation of torch's process groups in this process fail, those under way and those to come."""
    groups = list(dist.distributed_c10d._world.pg_map)  # they are listed nowhere else
    for group in groups:
        if "gloo" in _backends(group):
            close_connections(group)
    abort([_cuda_backend(group) for group in groups if "nccl" in _backends(group)])


def close_connections(group: dist.ProcessGroup) -> None:
    """Free whoever is blocked in a group of Gloo's; see the note above."""
    peer = next((rank for rank in range(group.size()) if rank != group.rank()), None)
    if peer is None:
        return
    with contextlib.suppress(RuntimeError):  # the timeout, which is the purpose, or they were closed before
        group.recv([torch.empty(1)], peer, _UNSENT_TAG).wait(_AT_ONCE)


def abort(backends: Sequence[Abortable]) -> None:
    """End the operations of NCCL's communicators.

    Args:
        backends: In the order in which they were made.
    """
    if not backends:
        return
    backends[0]._group_start()
    try:
        for backend in reversed(backends):
            backend.abort()
    finally:
        backends[0]._group_end()


def _backends(group: dist.ProcessGroup) -> str:
    """E.g. ``cpu:gloo,cuda:nccl``."""
    try:
        return str(dist.get_backend_config(group))
    except ValueError:  # destroyed meanwhile
        return ""


def _cuda_backend(group: dist.ProcessGroup) -> Any:
    return group._get_backend(torch.device("cuda"))
