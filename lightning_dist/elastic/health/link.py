"""Whether this host reaches the others, and how fast.

Anybody who listens is a peer: a connection is opened several times, which takes one round trip each. One
that cannot be opened, or takes much longer than the others, says that packets get lost.
"""

from __future__ import annotations

import socket
import statistics
import time

from lightning_dist.elastic.health.findings import Outcome
from lightning_dist.elastic.health.request import Peer, Request

_CONNECTIONS = 5


def check_link(request: Request) -> Outcome:
    """Each peer is reached, and soon enough."""
    limits = request.limits
    findings: list[str] = []
    latencies: list[float] = []
    for peer in request.peers:
        try:
            latency_s = _latency_s(peer, limits.link_timeout_s)
        except OSError as error:
            reason = f"no answer within {limits.link_timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
            findings.append(f"{peer} is not reached: {reason}")
            continue
        latencies.append(latency_s)
        if latency_s > limits.link_latency_s:
            findings.append(f"{peer} answers after {latency_s:.3f} s, at most {limits.link_latency_s:g} s are allowed")
    return Outcome(tuple(findings), {"link_latency_s": max(latencies)} if latencies else {})


def _latency_s(peer: Peer, timeout_s: float) -> float:
    """Half a round trip, the median of several."""
    seconds = []
    for _ in range(_CONNECTIONS):
        begin_s = time.monotonic()
        with socket.create_connection((peer.address, peer.port), timeout=timeout_s):
            seconds.append(time.monotonic() - begin_s)
    return statistics.median(seconds) / 2
