"""What Lightning asks of a process group, waited for without missing that another rank has failed.

``torch.distributed`` waits for the ranks it waits for: one that stays, because it failed elsewhere and still holds its
connections, keeps the others until the deadline. Here they look at the testimony meanwhile.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_dist.comm.collectives import Collectives, Work


def barrier(group: dist.ProcessGroup, device: torch.device, collectives: Collectives | None) -> None:
    """Wait for all ranks of a group; each calls it.

    Args:
        group: Whose.
        device: Of this rank; NCCL wants to know.
        collectives: The seam, once there is one.
    """
    devices = [device.index] if dist.get_backend(group) == "nccl" else None
    _wait(dist.barrier(group=group, device_ids=devices, async_op=True), group, collectives)


def meet(group: dist.ProcessGroup, collectives: Collectives | None) -> None:
    """Before an operation that blocks the host and cannot look up: wait until all are there. Nothing on NCCL."""
    if dist.get_backend(group) == "gloo":
        _wait(dist.barrier(group=group, async_op=True), group, collectives)


def all_reduce(
    tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, collectives: Collectives | None
) -> None:
    """Reduce a tensor in place over the ranks of a group; each calls it.

    Args:
        tensor: The same shape and dtype on every rank.
        op: Of the group's backend.
        group: Whose.
        collectives: The seam, once there is one.
    """
    _wait(dist.all_reduce(tensor, op=op, group=group, async_op=True), group, collectives)


def _wait(work: Work, group: dist.ProcessGroup, collectives: Collectives | None) -> None:
    # A wait of NCCL's that is cut short aborts its communicator.
    if collectives is None or dist.get_backend(group) != "gloo":
        work.wait()
    else:
        collectives.wait_watchfully(work)
