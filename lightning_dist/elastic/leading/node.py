"""An agent's part in a run, in a thread of its own: a member always, and the leader when its turn comes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_dist.elastic.leading import messages, succession
from lightning_dist.elastic.leading.beginning import begin
from lightning_dist.elastic.leading.channel import Channel, ClosedError, LostError, PartedError, answer
from lightning_dist.elastic.leading.ending import end_tasks
from lightning_dist.elastic.leading.inbox import Inbox
from lightning_dist.elastic.leading.leader import Leader, Parting
from lightning_dist.elastic.leading.load import take_load
from lightning_dist.elastic.leading.messages import Status
from lightning_dist.elastic.leading.remembered import Remembered
from lightning_dist.elastic.leading.seeking import NoLeaderError, Seeker
from lightning_dist.elastic.leading.setup import Setup
from lightning_dist.elastic.policy.events import Event, HostReady, RoundStopped
from lightning_dist.elastic.rounds import Round
from lightning_dist.elastic.session import End, Stop


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
        self._seeker = Seeker(setup, remembered, self._status)
        self._channel: Channel | None = None
        self._leader: Leader | None = None
        self._leading: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._leave = asyncio.Event()
        self._leave_reason = "its agent failed"
        self.has_leader = threading.Event()
        """Whoever leads is told all; may be waited for in any thread."""

    async def run(self) -> None:
        """Take part until :meth:`leave`."""
        self._listen()
        attending = asyncio.ensure_future(self._attend())
        leaving = asyncio.ensure_future(self._leave.wait())
        try:
            await asyncio.wait({attending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if attending.done():
                attending.result()
            await leaving
        finally:
            if self._channel is not None:  # these words come before any other that ends the connection
                await self._channel.close(self._leave_reason, is_end=self._leave.is_set())
            await end_tasks((attending, leaving))
            await self._close()

    def leave(self, reason: str) -> None:
        """End, in order."""
        self._leave_reason = reason
        self._leave.set()

    def tell(self, event: Event) -> None:
        """Let the leader know, now or once there is one."""
        serial = self._state.told(event)
        if isinstance(event, RoundStopped):
            self._inbox.round_ended(event.round)
        if self._channel is not None:
            self._channel.send({"kind": "told", "serial": serial, **messages.event_to_json(event)})

    async def _attend(self) -> None:
        """Be the member of one leader after the other."""
        while True:
            try:
                channel = await self._seeker.seek(self._begin_to_lead, self._joining)
            except NoLeaderError as error:
                self._inbox.put_order(error.end)
                return
            try:
                self.has_leader.set()
                await self._follow(channel)
            finally:
                self.has_leader.clear()
                self._channel = None
                await channel.close("it was lost")
            if self._leader is not None:  # who is a member elsewhere leads no more: others count on it
                self._leader.stand_down(Parting("its own host has lost it"))
                await self._end_to_lead()

    def _joining(self, channel: Channel) -> None:
        self._channel = channel

    async def _follow(self, channel: Channel) -> None:
        """Do what the leader says, until it is lost."""
        leader, is_certain = self._state.leader, False
        assert leader is not None, "it was joined"
        try:
            while True:
                self._take(await channel.receive())
        except ClosedError:
            is_certain = True
        except PartedError as error:
            if not error.is_end:  # it goes on as a member, or is awaited as one
                return
            is_certain = True
        except LostError as error:
            self._seeker.lost_leader(is_reset=error.is_reset)
        except (ConnectionError, KeyError, TypeError, ValueError) as error:
            self._setup.say(f"the leader on host {leader} said what cannot be understood: {error}")
        if leader != self._state.host:
            self._state.lost, self._state.lost_s = (leader, is_certain), time.monotonic()

    def _take(self, message: Mapping[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "round":
            value = messages.round_from_json(message["round"])
            self._state.began(value)
            self._seeker.unfence()
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
            seat = taken_back.seat_of(self._state.host)
            self.tell(RoundStopped(seat.host, order.number))
            self.tell(HostReady(seat.host, seat.num_ranks, seat.store_port))
        elif self._state.is_running:
            self._inbox.put_order(order)

    def _status(self) -> Status:
        state, leader = self._state, self._leader
        known = 0 if state.round is None else state.round.number
        if leader is None or not leader.is_serving:
            return Status(state.host, False, state.term, known)
        return Status(state.host, True, leader.duties.term, max(known, leader.round_number))

    # -- leading ------------------------------------------------------------------------------------------------------

    async def _begin_to_lead(self, term: int) -> None:
        self._leader = await begin(self._setup, self._state, term)
        self._leading = asyncio.ensure_future(self._lead(self._leader))

    async def _lead(self, leader: Leader) -> None:
        rivals = asyncio.ensure_future(self._watch_rivals(leader))
        try:
            await leader.run()
        finally:
            await end_tasks((rivals,))

    async def _watch_rivals(self, leader: Leader) -> None:
        """After a cut two may lead; once they see each other, the one that is behind stands down."""
        own = self._setup.own
        assert own is not None, "it leads"
        async with self._seeker.roll_call() as roll:
            while len(self._setup.endpoints) > 1:
                await asyncio.sleep(2 * self._setup.pace.ping_s)
                statuses = await roll.statuses()
                statuses[own] = self._status()  # as it is now
                for index, status in enumerate(statuses):
                    is_rival = index != own and status is not None and status.is_leading
                    if is_rival and succession.rank_of(statuses, index) > succession.rank_of(statuses, own):
                        leader.stand_down(Parting(f"{self._setup.endpoints[index]} leads by now"))

    async def _end_to_lead(self) -> None:
        """What it learned as the leader is remembered; what the leader failed of is what this agent ends with."""
        leader, leading, state = self._leader, self._leading, self._state
        assert leader is not None, "it led"
        assert leading is not None, "it led"
        await leading
        self._leader = self._leading = None
        parting = leader.parting
        if parting is None:  # the run has ended
            return
        refusal = parting.refusal
        is_news = refusal is None or refusal.is_void or self._seeker.fence(parting.reason)
        if is_news:
            self._setup.say(f"host {state.host} leads no more: {parting.reason}")
        for heard in (leader.round, parting.newer):
            if heard is not None and (state.round is None or heard.number > state.round.number):
                state.heard_of(heard)
        if refusal is not None and refusal.is_void:
            last = state.round or Round(0, (), leader.duties.run)
            state.heard_of(replace(last, number=refusal.number), has_stopped=True)

    # -- the own endpoint ---------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._listener is not None:
            self._listener.setblocking(False)
            asyncio.get_running_loop().add_reader(self._listener, self._called, self._listener)

    def _called(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:  # it hung up at once
            return
        except OSError:  # no more descriptors: later, perhaps
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            loop.call_later(self._setup.pace.ping_s, self._listen)
            return
        call = asyncio.ensure_future(self._take_call(connection))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        call.add_done_callback(lambda _: connection.close())  # if it was cancelled before it began

    async def _take_call(self, connection: socket.socket) -> None:
        """Answer whoever calls: a stranger, one that wants to know who leads, or a member."""
        channel, pace = None, self._setup.pace
        try:
            channel = await answer(connection, self._setup.secret, pace, timeout_s=pace.deadline_s)
            with contextlib.suppress(KeyError, TypeError, ValueError):
                await self._converse(channel)
        except OSError:
            pass  # a stranger, or one that hung up; of a lost member the leader has said it
        finally:
            if channel is not None:
                await channel.close("that was all")

    async def _converse(self, channel: Channel) -> None:
        message = await channel.receive()
        if message.get("kind") == "status":
            channel.send(messages.status_to_json(self._status()))
            await channel.receive()  # until the other side hangs up
        elif message.get("kind") == "load":
            await take_load(channel, message)
        elif self._leader is None or not self._leader.is_serving:
            channel.send({"kind": "refused", "reason": "it does not lead"})
        else:
            await self._leader.serve(channel, messages.hello_from_json(message))

    async def _close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        if self._leader is not None and self._leading is not None:
            self._leader.stand_down(Parting(self._leave_reason, is_end=True))
            await asyncio.gather(self._leading, return_exceptions=True)
        await end_tasks(self._calls)
