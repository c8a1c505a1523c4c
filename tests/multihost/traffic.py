"""What the multi-host tests run on ranks: sums whose bytes on the link are counted by the kernel."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_dist.laws import tcp_wire_bytes
from tests.distributed.runs import opened
from tests.support.tasks import RankContext


@dataclass(frozen=True)
class Traffic:
    """What one rank saw of one sum.

    Attributes:
        host: Where the rank sits.
        sent_bytes: What the host sent on its link meanwhile (:func:`sent_bytes`); the least of some sums.
        result: The sum.
    """

    host: str
    sent_bytes: int
    result: torch.Tensor


_BESIDE = 0.02  # of the payload: barriers, the headers of messages of Gloo
_UNSEEN = 0.01  # likewise: acknowledgements that the queue drops, which their sockets count and the link does not
_ACKNOWLEDGEMENT_BYTES = 14 + 20 + 32  # Ethernet, IPv4, TCP with timestamps, and no data


def sent_bytes() -> int:
    """Bytes this host has sent on eth0, without acknowledgements, of which a busy machine sends more.

    These are counted by the sockets that are open; differences are right while none of them closes. Data that is sent
    again counts once, since what was lost, was lost in the queue before the link.
    """
    asked = ["ss", "-tinHO", "state", "established"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    sockets = "\n".join(line for line in lines if not _stays_on_the_host(line))
    acknowledgements = _sum_of("segs_out", sockets) - _sum_of("data_segs_out", sockets)
    return _link_bytes() - _ACKNOWLEDGEMENT_BYTES * acknowledgements


def _link_bytes() -> int:
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        device, _, counters = line.partition(":")
        if device.strip() == "eth0":
            return int(counters.split()[8])
    raise RuntimeError("this host has no eth0")


def _stays_on_the_host(socket: str) -> bool:
    """Ranks of a host reach each other by its address on the link, too."""
    own, peer = (address.rpartition(":")[0] for address in socket.split()[2:4])
    return own == peer


def _sum_of(counter: str, sockets: str) -> int:
    return sum(int(value) for value in re.findall(rf"(?<!\S){counter}:(\d+)", sockets))


def assert_payload(got_bytes: int, payload_bytes: float) -> None:
    """What :func:`sent_bytes` has counted is a payload and the headers of full packets, or of fewer and longer ones."""
    ratio = got_bytes / payload_bytes
    low, high = (1 - _UNSEEN) * payload_bytes, tcp_wire_bytes(payload_bytes) + _BESIDE * payload_bytes
    assert low <= got_bytes <= high, f"{ratio:.3f} x formula"


def values_of(rank: int, numel: int) -> torch.Tensor:
    """Small integers, exact in every order of summation and in bf16."""
    return ((torch.arange(numel) * 7 + rank * 3) % 5).float()


def count_sum(context: RankContext, numel: int, sync: dict[str, Any]) -> Traffic:
    """Sum fp32 values over all ranks; between barriers, so that each host counts the sum and nothing else of weight."""
    counts = []
    with opened(context, sync) as (_, all_reduce):
        all_reduce.all_reduce(torch.ones(1000))
        for _ in range(3):
            tensor = values_of(context.rank, numel)
            context.barrier()
            before = sent_bytes()
            all_reduce.all_reduce(tensor)
            context.barrier()
            counts.append(sent_bytes() - before)
            context.barrier()
    return Traffic(context.host, min(counts), tensor)
