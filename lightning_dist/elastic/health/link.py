"""Whether this host reaches the others, soon enough, without losing much on the way, and with enough room on it.

Anybody who listens is a peer: opening a connection takes one round trip. Where a packet of it is lost, the kernel sends
it again after a second, so that lost packets show as connections that took so much longer. Agents take bytes, too, and
send some, if one knows their secret: the first that does so is enough, since this host's own side of the way is meant.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence

from lightning_dist.elastic.health.carried import carried
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
    reached: list[Peer] = []
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
        reached.append(peer)
    figures = {"link_latency_s": max(latencies)} if latencies else {}
    room = Outcome() if request.secret is None else _room(reached, request.secret, limits)
    return Outcome((*findings, *room.findings), {**figures, **room.figures}, room.notes)


def _room(peers: Sequence[Peer], secret: bytes, limits: HealthLimits) -> Outcome:
    """What the way to the first of them that is an agent carries."""
    size_bytes, least = limits.link_tested_bytes, limits.link_bytes_per_s
    timeout_s = size_bytes / least if least else limits.link_timeout_s
    notes: list[str] = []
    for peer in peers:
        try:
            found = carried(peer, secret, size_bytes=size_bytes, timeout_s=timeout_s)
        except TimeoutError:
            slow = f"{peer} was not sent {size_bytes >> 10} KiB, nor sent them, within {timeout_s:.2g} s each"
            return Outcome((f"{slow}; at least {least / 1e3:g} kB/s are needed",), notes=tuple(notes))
        except OSError as error:
            notes.append(f"what the way to {peer} carries was not measured: {error}")
            continue
        return Outcome((), {"link_bytes_per_s": min(found.there_bytes_per_s, found.back_bytes_per_s)}, tuple(notes))
    return Outcome(notes=tuple(notes))


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
