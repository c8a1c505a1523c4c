"""What the multi-host tests run on ranks: sums whose bytes on the link are counted by the kernel."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_dist.laws import tcp_wire_bytes
from tests.distributed.runs import opened
from tests.support.tasks import RankContext

BESIDE = 0.02  # of the payload: barriers, the headers of messages of Gloo


@dataclass(frozen=True)
class Sent:
    """Bytes that a host has sent on its link, between two bounds.

    A busy machine sends acknowledgements, and sends data again: what the sockets count of that has been on the link, or
    has not if the host's own queue had dropped it. The kernel does not say which.

    Attributes:
        least: All that they count is taken off.
        most: Nothing is.
    """

    least: int
    most: int

    def __sub__(self, before: Sent) -> Sent:
        return Sent(self.least - before.least, self.most - before.most)


@dataclass(frozen=True)
class Traffic:
    """What one rank saw of one sum.

    Attributes:
        host: Where the rank sits.
        sent: What the host sent on its link meanwhile; the least of some sums.
        result: The sum.
        inside_bytes: What ranks of the host sent each other over sockets; the least of some sums.
    """

    host: str
    sent: Sent
    result: torch.Tensor
    inside_bytes: int


_ACKNOWLEDGEMENT_BYTES = 14 + 20 + 32  # Ethernet, IPv4, TCP with timestamps, and no data


def sent_bytes() -> Sent:
    """What this host has sent on eth0.

    Acknowledgements, and data sent again, are counted by the sockets that are open; differences are right while none of
    them closes.
    """
    asked = ["ss", "-tinHO", "state", "established"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    sockets = "\n".join(line for line in lines if not _stays_on_the_host(line))
    acknowledgements = _sum_of("segs_out", sockets) - _sum_of("data_segs_out", sockets)
    most = _link_bytes()
    return Sent(most - _ACKNOWLEDGEMENT_BYTES * acknowledgements - _sum_of("bytes_retrans", sockets), most)


def least_step(marks: Sequence[Sent]) -> Sent:
    """Of what was sent between each two counts, that which a busy machine has added least to."""
    return min((after - before for before, after in itertools.pairwise(marks)), key=lambda sent: sent.least)


def assert_sent(sent: Sent, payload_bytes: float) -> None:
    """The payload was sent, with the headers of TCP and little beside: barriers, the headers of Gloo's messages."""
    print(f"{sent}: {sent.least / payload_bytes:.3f} to {sent.most / payload_bytes:.3f} x formula")
    assert payload_bytes <= sent.most
    assert sent.least <= tcp_wire_bytes(payload_bytes) + BESIDE * payload_bytes


def _link_bytes(name: str = "eth0") -> int:
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        device, _, counters = line.partition(":")
        if device.strip() == name:
            return int(counters.split()[8])
    raise RuntimeError(f"this host has no {name}")


def _stays_on_the_host(socket: str) -> bool:
    """Ranks of a host reach each other by its address on the link, too."""
    own, peer = (address.rpartition(":")[0] for address in socket.split()[2:4])
    return own == peer


def _sum_of(counter: str, sockets: str) -> int:
    return sum(int(value) for value in re.findall(rf"(?<!\S){counter}:(\d+)", sockets))


def values_of(rank: int, numel: int) -> torch.Tensor:
    """Small integers, exact in every order of summation and in bf16."""
    return ((torch.arange(numel) * 7 + rank * 3) % 5).float()


def count_sum(context: RankContext, numel: int, sync: dict[str, Any]) -> Traffic:
    """Sum fp32 values over all ranks; between barriers, so that each host counts the sum and nothing else of weight."""
    counts: list[Sent] = []
    inside: list[int] = []
    with opened(context, sync) as (_, all_reduce):
        all_reduce.all_reduce(torch.ones(1000))
        for _ in range(3):
            tensor = values_of(context.rank, numel)
            context.barrier()
            before, before_inside = sent_bytes(), _link_bytes("lo")
            context.barrier()  # no rank of the host sends before all have counted
            all_reduce.all_reduce(tensor)
            context.barrier()
            counts.append(sent_bytes() - before)
            inside.append(_link_bytes("lo") - before_inside)
            context.barrier()
    return Traffic(context.host, min(counts, key=lambda sent: sent.most), tensor, min(inside))
