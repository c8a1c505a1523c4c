"""An agent's part in a run, in a thread of its own: a member always, and the leader when its turn comes."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from lightning_dist.elastic.leading import messages, succession
from lightning_dist.elastic.leading.channel import Channel, ClosedError, LostError, Pace, PartedError, answer, dial
from lightning_dist.elastic.leading.endpoints import Endpoint
from lightning_dist.elastic.leading.inbox import Inbox
from lightning_dist.elastic.leading.leader import Duties, Leader, Reactor
from lightning_dist.elastic.leading.messages import Status
from lightning_dist.elastic.leading.remembered import Remembered
from lightning_dist.elastic.policy.events import Event, HostReady, RoundStopped
from lightning_dist.elastic.session import End, Stop
from lightning_dist.wire import WrongSecretError

MakePolicy = Callable[[Duties, Remembered], Reactor]


class NoLeaderError(Exception):
    """There is none in time, or it does not take this host."""


@dataclass(frozen=True)
class Setup:
    """Where the leaders may be, and how long things may take.

    Attributes:
        endpoints: In the order in which they lead.
        own: This host's index among them; ``None``: it never leads.
        secret: That all agents share.
        make_policy: Makes the policy of a leader, of its duties and what this host remembers.
        pace: Of all connections.
        say: Tells people.
        join_s: How long to look for a leader at the start, in seconds.
        seek_s: How long to look for the next one, in seconds.
        first_s: At the start an endpoint waits so long for those before it, in seconds.
    """

    endpoints: Sequence[Endpoint]
    own: int | None
    secret: bytes = field(repr=False)
    make_policy: MakePolicy
    pace: Pace
    say: Callable[[str], None]
    join_s: float
    seek_s: float
    first_s: float


class Node:
    """See the module. Calls are made in the loop's thread.

    Args:
        setup: Where and how.
        remembered: Who this host is.
        inbox: Where what the leader wants is put.
        listener: Of the own endpoint; ``None``: it never leads.
    """

    def __init__(
        self, setup: Setup, remembered: Remembered, inbox: Inbox, *, listener: socket.socket | None = None
    ) -> None:
        self._setup = setup
        self._state = remembered
        self._inbox = inbox
        self._listener = listener
        self._channel: Channel | None = None
        self._leader: Leader | None = None
        self._leading: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._leave = asyncio.Event()
        self._leave_reason = "its agent failed"
        self._leader_index: int | None = None
        self._may_be_dead = False  # the connection to the last leader was reset

    async def run(self) -> None:
        """Take part until :meth:`leave`."""
        server = None
        if self._listener is not None:
            server = await asyncio.start_server(self._called, sock=self._listener)
        attending = asyncio.ensure_future(self._attend())
        leaving = asyncio.ensure_future(self._leave.wait())
        try:
            await asyncio.wait({attending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if attending.done():
                attending.result()
            await leaving
        finally:
            for task in (attending, leaving):
                task.cancel()
            await asyncio.gather(attending, leaving, return_exceptions=True)
            if server is not None:
                server.close()  # listens no more
            await self._close()

    def leave(self, reason: str) -> None:
        """End, in order."""
        self._leave_reason = reason
        self._leave.set()

    def tell(self, event: Event) -> None:
        """Let the leader know, now or once there is one."""
        self._state.told(event)
        if isinstance(event, RoundStopped):
            self._inbox.round_ended(event.round)
        if self._channel is not None:
            self._channel.send({"kind": "told", **messages.event_to_json(event)})

    async def _attend(self) -> None:
        """Be the member of one leader after the other."""
        while True:
            try:
                channel = await self._seek()
            except NoLeaderError as error:
                self._inbox.put_order(End(1, str(error)))
                return
            self._channel = channel
            try:
                await self._follow(channel)
            finally:
                self._channel = None
                await channel.close("it was lost")
            if self._leading is not None and self._leading.done():
                self._leading.result()  # what the leader failed of is what this agent ends with

    async def _seek(self) -> Channel:
        """The connection to who leads, which may be this host.

        Raises:
            NoLeaderError: There is none in time, or it does not take this host.
        """
        setup, start_s = self._setup, time.monotonic()
        limit_s, reason = (setup.join_s if self._state.leader is None else setup.seek_s), ""
        while (waited_s := time.monotonic() - start_s) < limit_s:
            statuses = await self._statuses()
            choice = succession.choose(statuses, own=setup.own, has_waited=waited_s > setup.first_s)
            if isinstance(choice, succession.Lead):
                self._begin_to_lead(choice.term)
                assert setup.own is not None, "it is this one's turn"
                choice = succession.Join(setup.own)
            if isinstance(choice, succession.Join):
                try:
                    return await self._join(choice.index)
                except OSError as error:
                    reason = str(error)
            else:
                reason = choice.reason
            await asyncio.sleep(setup.pace.ping_s / 5)
        endpoints = ", ".join(str(endpoint) for endpoint in setup.endpoints)
        raise NoLeaderError(f"no leader was found at {endpoints} within {limit_s:g} s: {reason}")

    async def _join(self, index: int) -> Channel:
        channel = await self._dial(index)
        try:
            channel.send(messages.hello_to_json(self._state.hello()))
            reply = await channel.receive()
            if reply.get("kind") == "refused" and reply.get("is_final") is True:
                raise NoLeaderError(f"{self._setup.endpoints[index]} does not take this host: {reply.get('reason')}")
            if reply.get("kind") != "welcome":
                raise ConnectionError(str(reply.get("reason")))
        except BaseException as error:
            await channel.close(f"not joined: {error}")
            raise
        state = self._state
        state.leader, state.term, state.run = str(reply["host"]), int(reply["term"]), str(reply["run"])
        self._leader_index = index
        return channel

    async def _follow(self, channel: Channel) -> None:
        """Do what the leader says, until it is lost."""
        assert self._state.leader is not None, "it was joined"
        is_certain = self._may_be_dead = False
        try:
            while True:
                self._take(await channel.receive())
        except ClosedError:
            is_certain = True
        except PartedError as error:
            is_certain = error.is_end
        except LostError as error:
            self._may_be_dead = error.is_reset
        except ConnectionError as error:
            self._setup.say(f"the leader on host {self._state.leader} said what cannot be understood: {error}")
        self._state.lost = (self._state.leader, is_certain)

    def _take(self, message: Mapping[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "round":
            value = messages.round_from_json(message["round"])
            self._state.began(value)
            self._inbox.put_round(value)
        elif kind == "memory":
            self._state.memory = dict(message["memory"])
        elif kind in ("stop", "end"):
            self._obey(messages.order_from_json(message))
        else:
            raise ConnectionError(f"a leader does not say {kind!r}")

    def _obey(self, order: Stop | End) -> None:
        if isinstance(order, End):
            self._inbox.put_order(order)
        elif (taken_back := self._inbox.withdraw(order.number)) is not None:  # its ranks were not started yet
            self.tell(RoundStopped(self._state.host, order.number))
            self.tell(HostReady(self._state.host, taken_back.seat_of(self._state.host).num_ranks))
        elif self._state.is_running:
            self._inbox.put_order(order)

    async def _statuses(self) -> list[Status | None]:
        """What each endpoint says of itself; this host's own is known."""
        indices = range(len(self._setup.endpoints))
        return list(await asyncio.gather(*(self._ask(index) for index in indices)))

    async def _ask(self, index: int) -> Status | None:
        if index == self._setup.own:
            return self._status()
        try:
            channel = await self._dial(index)
        except WrongSecretError as error:
            if self._state.leader is None:
                raise NoLeaderError(
                    f"who answers at {self._setup.endpoints[index]} has another secret; give all hosts the same one"
                ) from error
            return None
        except OSError as error:
            if isinstance(error, ConnectionRefusedError) and self._may_be_dead and index == self._leader_index:
                assert self._state.lost is not None, "it was the leader"
                self._state.lost = (self._state.lost[0], True)  # its host is there, and nobody listens
            return None
        try:
            channel.send({"kind": "status"})
            return messages.status_from_json(await channel.receive())
        except ConnectionError:
            return None
        finally:
            await channel.close("that was all")

    async def _dial(self, index: int) -> Channel:
        setup = self._setup
        return await dial(setup.endpoints[index], setup.secret, setup.pace, timeout_s=2 * setup.pace.ping_s)

    def _status(self) -> Status:
        state, leader = self._state, self._leader
        is_leading = leader is not None and not leader.is_over
        known = 0 if state.round is None else state.round.number
        return Status(state.host, is_leading, state.term, max(known, leader.round_number if leader else 0))

    def _begin_to_lead(self, term: int) -> None:
        state = self._state
        run = state.run or f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        state.term, setup = term, self._setup
        duties = Duties(state.host, state.address, term, run, setup.pace, setup.say, state.round, state.lost)
        self._leader = Leader(duties, setup.make_policy(duties, state))
        self._leading = asyncio.ensure_future(self._lead(self._leader))

    async def _lead(self, leader: Leader) -> None:
        rivals = asyncio.ensure_future(self._watch_rivals(leader))
        try:
            await leader.run()
        finally:
            rivals.cancel()
            await asyncio.gather(rivals, return_exceptions=True)

    async def _watch_rivals(self, leader: Leader) -> None:
        """After a cut two may lead; once they see each other, the one that lost hosts stands down."""
        own = self._setup.own
        assert own is not None, "it leads"
        while len(self._setup.endpoints) > 1:
            await asyncio.sleep(2 * self._setup.pace.ping_s)
            statuses = await self._statuses()
            for index, status in enumerate(statuses):
                is_rival = index != own and status is not None and status.is_leading
                if is_rival and succession.rank_of(statuses, index) > succession.rank_of(statuses, own):
                    leader.stand_down(f"{self._setup.endpoints[index]} leads by now")

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer whoever calls the own endpoint."""
        task = asyncio.current_task()
        assert task is not None, "it is one"
        self._calls.add(task)
        channel = None
        try:
            pace = self._setup.pace
            channel = await answer(reader, writer, self._setup.secret, pace, timeout_s=pace.deadline_s)
            message = await channel.receive()
            if message.get("kind") == "status":
                channel.send(messages.status_to_json(self._status()))
                await channel.receive()  # until the other side hangs up
            elif self._leader is None or self._leader.is_over:
                channel.send({"kind": "refused", "reason": "it does not lead"})
            else:
                await self._leader.serve(channel, messages.hello_from_json(message))
        except ConnectionError:
            pass  # a stranger, or one that hung up: what a member is lost of, the leader has said
        except OSError:
            pass
        finally:
            if channel is not None:
                await channel.close("that was all")
            self._calls.discard(task)

    async def _close(self) -> None:
        if self._channel is not None:
            await self._channel.close(self._leave_reason, is_end=True)
        if self._leader is not None and self._leading is not None:
            self._leader.stand_down(self._leave_reason, is_end=True)
            await asyncio.gather(self._leading, return_exceptions=True)
        while self._calls:
            for call in self._calls:
                call.cancel()
            await asyncio.wait(self._calls)
