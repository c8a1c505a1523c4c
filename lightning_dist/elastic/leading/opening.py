"""Opens an agent's session: the one place where a leader's parts are put together."""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.leading import secret as secrets_of_run
from lightning_dist.elastic.leading.channel import Pace
from lightning_dist.elastic.leading.endpoints import Endpoint, listen, own_index
from lightning_dist.elastic.leading.fence import Fence
from lightning_dist.elastic.leading.inbox import Inbox
from lightning_dist.elastic.leading.node import Node
from lightning_dist.elastic.leading.remembered import Remembered
from lightning_dist.elastic.leading.setup import Setup
from lightning_dist.elastic.leading.socket_session import SocketSession
from lightning_dist.elastic.policy.machine import Policy
from lightning_dist.elastic.policy.situation import Waits
from lightning_dist.errors import ConfigError

LOOPBACK = "127.0.0.1"
JOIN_S = 600.0
SEEK_S = 60.0
FIRST_S = 30.0


def open_session(
    *,
    host: str,
    min_hosts: int,
    max_hosts: int,
    options: ElasticConfig,
    address: str = LOOPBACK,
    endpoints: Sequence[Endpoint] = (),
    secret: bytes | None = None,
    run: str | None = None,
    fence: Path | None = None,
    record: Path | None = None,
    pace: Pace | None = None,
    say: Callable[[str], None] | None = None,
    join_s: float = JOIN_S,
    seek_s: float | None = None,
    first_s: float = FIRST_S,
    waits: Waits | None = None,
) -> SocketSession:
    """Begin to take part in a run; it starts a thread, which :meth:`~SocketSession.leave` ends.

    Args:
        host: This host's name, unlike that of any other.
        min_hosts: No round has fewer.
        max_hosts: No round has more.
        options: Until the script tells its own.
        address: Under which other hosts reach this one.
        endpoints: Where leaders may be, in their order; none: this agent is alone, and leads.
        secret: That all agents share; needed with ``endpoints``.
        run: The run's name; ``None``: the first leader makes one.
        fence: A folder on storage that all hosts share, in which each round is claimed.
        record: A folder for ``incidents.jsonl``; written by whoever leads.
        pace: How often agents say that they live, and how long one may be silent.
        say: Tells people; ``None``: prints to standard error.
        join_s: How long to look for a leader at the start, in seconds.
        seek_s: How long to look for the next one, in seconds; ``None``: a minute, and as long as a host is waited for.
        first_s: At the start an endpoint waits so long for those before it, in seconds.
        waits: How long the policy waits for hosts.

    Raises:
        ConfigError: There is no secret, or a fence without a name of the run.
        LaunchError: This host's endpoint is taken.
    """
    own = own_index(endpoints, host=host, address=address) if endpoints else 0
    shared = secrets_of_run.required(secret) if endpoints else secrets_of_run.own()
    Policy(options, min_hosts=min_hosts, max_hosts=max_hosts, host=host)  # what is wrong with the numbers is said now
    if fence is not None:
        _check_fence(fence, run)
    listener, endpoints = _listen(endpoints, own, address)
    setup = Setup(
        endpoints, own, shared, options, min_hosts, max_hosts, pace or Pace(), say or _print,
        join_s=join_s, seek_s=SEEK_S + options.rejoin_s if seek_s is None else seek_s, first_s=first_s,
        waits=waits or Waits(), fence=fence, record=record,
    )  # fmt: skip
    inbox = Inbox()
    remembered = Remembered(host, address, secrets.token_hex(8), run=run)
    return SocketSession(host, Node(setup, remembered, inbox, listener=listener), inbox)


def _check_fence(fence: Path, run: str | None) -> None:
    """That its folder can be made is seen before anything starts."""
    if run is None:
        raise ConfigError("a fence is of one run, whose name all hosts must know; write --run NAME beside --fence")
    Fence(fence, run)


def _listen(
    endpoints: Sequence[Endpoint], own: int | None, address: str
) -> tuple[socket.socket | None, Sequence[Endpoint]]:
    """Listen at this host's endpoint, if it has one; the endpoints with the address and port that it got."""
    if own is None:
        return None, endpoints
    reached = address if endpoints else LOOPBACK
    listener = listen(endpoints[own] if endpoints else Endpoint(LOOPBACK, 0), reached)
    port = int(listener.getsockname()[1])
    return listener, [*endpoints[:own], Endpoint(reached, port), *endpoints[own + 1 :]]


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads any more
        sys.stderr.write(f"hierdist: {text}\n")
        sys.stderr.flush()
