"""Agents without ranks: sessions of several hosts in one process, to see who leads and what each is told."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.leading import Endpoint, Pace, open_session
from lightning_dist.elastic.leading.socket_session import SocketSession
from lightning_dist.elastic.policy.events import FirstStep, RoundStopped
from lightning_dist.elastic.policy.situation import State
from lightning_dist.elastic.rounds import Round
from lightning_dist.elastic.session import End, Stop
from tests.support.processes import free_port

DEADLINE_S = 30.0
SECRET = b"a secret that all agents share"
QUICK = Pace(ping_s=0.1, deadline_s=0.5)


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until something is true; what it is."""
    end = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {DEADLINE_S:g} s"
        time.sleep(0.005)
    return found


@dataclass
class Agent:
    """A host's session, and what an agent would do with it.

    Attributes:
        host: Its name.
        session: Its session.
        said: What it told people.
    """

    host: str
    session: SocketSession
    said: list[str] = field(default_factory=list)

    @property
    def leader(self) -> Any:
        """What leads on this host, if it does."""
        node: Any = self.session._node
        return node._leader

    @property
    def leads(self) -> bool:
        """This host leads."""
        return self.leader is not None and not self.leader.is_over

    def kill(self, *, with_reset: bool = False) -> None:
        """End as a process does that is killed: the kernel closes its connections, and nobody says a word.

        Args:
            with_reset: It resets them, as it does where something was not read yet.
        """
        node: Any = self.session._node

        def die() -> None:
            members = [] if node._leader is None else node._leader._members.values()
            for channel in (node._channel, *(member.channel for member in members)):
                if channel is not None:
                    connection = channel._stream._socket
                    if with_reset:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    connection.close()
            self.session._loop.remove_reader(node._listener)
            node._listener.close()
            node.leave("it was killed")

        self.session._loop.call_soon_threadsafe(die)
        self.session._thread.join(DEADLINE_S)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """It does nothing during the block, as a process that is stopped."""
        is_over = threading.Event()
        self.session._loop.call_soon_threadsafe(is_over.wait, DEADLINE_S)
        try:
            yield
        finally:
            is_over.set()

    def ready(self) -> None:
        """Wait for a round, with two ranks."""
        self.session.ready(2)

    def next(self) -> Round:
        """The next round."""
        taken = self.session.next_round(DEADLINE_S)
        assert isinstance(taken, Round), taken
        return taken

    def step(self, value: Round, step: int = 1) -> None:
        """All ranks have done their first step."""
        self.session.tell(FirstStep(self.host, value.number, step))

    def order(self) -> Stop | End:
        """What the leader wants next."""
        order: Stop | End = until(self.session.order, f"an order to {self.host}")
        return order

    def stop(self) -> Stop:
        """Wait for the order to stop, do it, and wait for the next round."""
        order = self.order()
        assert isinstance(order, Stop), order
        self.session.tell(RoundStopped(self.host, order.number))
        self.ready()
        return order

    def end(self) -> End:
        """What the run ends with."""
        taken = self.session.next_round(DEADLINE_S)
        assert isinstance(taken, End), taken
        return taken


class Party:
    """Opens sessions; all are closed at the end.

    Args:
        num_endpoints: So many of the hosts can lead: ``a`` at 127.0.0.1, ``b`` at 127.0.0.2, ...
        options: Of all.
        arguments: Of :func:`open_session`, for all.
    """

    def __init__(self, num_endpoints: int = 1, *, mode: str = "degrade", **arguments: Any) -> None:
        self.endpoints = [Endpoint(f"127.0.0.{number}", free_port()) for number in range(1, num_endpoints + 1)]
        self._arguments: dict[str, Any] = {
            "options": ElasticConfig(mode=mode),
            "secret": SECRET,
            "pace": QUICK,
            "first_s": 0.2,
            **arguments,
        }
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Party:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def agent(self, host: str, **arguments: Any) -> Agent:
        """A session of a host: ``a``, ``b``, ..."""
        said: list[str] = []
        session = open_session(
            **{
                "host": host,
                "address": f"127.0.0.{1 + ord(host) - ord('a')}",
                "endpoints": self.endpoints,
                "say": said.append,
                **self._arguments,
                **arguments,
            }
        )
        self._open.callback(session.leave, "the test is over")
        return Agent(host, session, said)

    def agents(self, hosts: Sequence[str]) -> list[Agent]:
        """One of each."""
        return [self.agent(host) for host in hosts]

    def begun(self, hosts: Sequence[str]) -> list[Agent]:
        """One of each, in their first round, which the first of them leads."""
        agents = self.agents(hosts)
        for agent in agents:
            agent.ready()
        in_round(agents)
        assert [agent.host for agent in agents if agent.leads] == [agents[0].host]
        return agents


def in_round(agents: Sequence[Agent], *, step: int = 1) -> Round:
    """All get the same round, do its first step, and the leader, if it is one of them, has heard of it."""
    rounds = [agent.next() for agent in agents]
    assert all(value == rounds[0] for value in rounds), rounds
    for agent in agents:
        agent.step(rounds[0], step)
    policies = [agent.leader._policy for agent in agents if agent.leads]
    until(lambda: all(policy.situation.state is State.RUNNING for policy in policies), "all have done a step")
    return rounds[0]
