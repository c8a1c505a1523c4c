"""Whether this host reaches the others, soon enough and without losing much on the way.

Anybody who listens is a peer: opening a connection takes one round trip. Where a packet of it is lost, the kernel sends
it again after a second, so that lost packets show as connections that took so much longer. How many bytes a second the
way carries is not measured here: nobody is asked to take them before a host has joined. The monitor measures it later.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence

from lightning_dist.elastic.health.findings import Outcome
from lightning_dist.elastic.health.limits import HealthLimits
from lightning_dist.elastic.health.request import Peer, Request

_CONNECTIONS = 10
_STANDBY_S = 1.5  # for somebody who may not be there; one lost packet costs a second
_SENT_AGAIN_S = 0.9  # Linux waits a second before it sends the first packet of a connection again


def check_link(request: Request) -> Outcome:
    """Each peer."""
    limits = request.limits
    findings: list[str] = []
    latencies: list[float] = []
    for peer in request.peers:
        try:
            if not peer.must_answer and not _answers(peer, limits):
                continue
            seconds = [_connection_s(peer, limits.link_timeout_s) for _ in range(_CONNECTIONS)]
        except OSError as error:
            reason = f"no answer within {limits.link_timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
            findings.append(f"{peer} is not reached: {reason}")
            continue
        latencies.append(latency_s(seconds))
        findings += [f"{peer} {what}" for what in judged(seconds, limits)]
    return Outcome(tuple(findings), {"link_latency_s": max(latencies)} if latencies else {})


def latency_s(seconds: Sequence[float]) -> float:
    """Half a round trip, from how long connections took: the median."""
    return statistics.median(seconds) / 2


def judged(seconds: Sequence[float], limits: HealthLimits) -> list[str]:
    """What is wrong with the way to a peer, from how long connections took."""
    found = []
    usual_s = min(seconds)
    late = sum(each > usual_s + _SENT_AGAIN_S for each in seconds)
    if late > limits.link_lost_share * len(seconds):
        allowed = f"at most {limits.link_lost_share:.0%} are allowed"
        found.append(f"loses packets: {late} of {len(seconds)} connections had to be asked for again, {allowed}")
    elif latency_s(seconds) > limits.link_latency_s:
        found.append(f"answers after {latency_s(seconds):.3f} s, at most {limits.link_latency_s:g} s are allowed")
    return found


def _answers(peer: Peer, limits: HealthLimits) -> bool:
    try:
        _connection_s(peer, min(limits.link_timeout_s, _STANDBY_S))
    except OSError:
        return False
    return True


def _connection_s(peer: Peer, timeout_s: float) -> float:
    begin_s = time.monotonic()
    with socket.create_connection((peer.address, peer.port), timeout=timeout_s):
        return time.monotonic() - begin_s
