"""The leader: hears all agents, asks the policy, and does what it says.

One event at a time: what the policy makes of it is done before the next is heard.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_dist.elastic.leading import announce, messages
from lightning_dist.elastic.leading.channel import Channel, ClosedError, LostError, PartedError
from lightning_dist.elastic.leading.claiming import Refusal, claim_round, note_end
from lightning_dist.elastic.leading.duties import Duties, Reactor
from lightning_dist.elastic.leading.messages import Hello
from lightning_dist.elastic.leading.slowness import Slowness
from lightning_dist.elastic.policy.actions import Action, EndRun, Say, SetAside, StartRound, StopRound
from lightning_dist.elastic.policy.events import Event, HostLost, HostReady, HostUnhealthy, Tick
from lightning_dist.elastic.rounds import Round, Seat
from lightning_dist.elastic.session import End, Stop

_MEMORY_S = 10.0  # the next leader's picture of restarts and failures is at most so old


@dataclass
class _Member:
    hello: Hello
    channel: Channel
    is_replaced: bool = False


@dataclass(frozen=True)
class Parting:
    """Why a leader leads no more.

    Attributes:
        reason: For people.
        is_end: Its host has no part in the run any more.
        refusal: It did not get the claim of a round.
        newer: A round that it did not know of.
    """

    reason: str
    is_end: bool = False
    refusal: Refusal | None = None
    newer: Round | None = None


class Leader:
    """See the module. All calls are made in the loop's thread.

    Args:
        duties: Who leads.
        policy: Decides.
    """

    def __init__(self, duties: Duties, policy: Reactor) -> None:
        self.duties = duties
        self.parting: Parting | None = None
        """Why it leads no more; ``None``: it leads."""
        self._policy = policy
        self._clock = duties.clock
        self._members: dict[str, _Member] = {}
        self._seats: dict[str, Seat] = {}
        self._came: set[str] = set()  # hosts that were members, if only for a while
        self._dead: set[str] = set()
        self._heard: dict[str, int] = {}  # by instance, the serial of the last event
        self._round = duties.last_round
        self._stop: Stop | None = None
        self._end: End | None = None
        self._has_closed = False
        self._slowness = Slowness(duties.options)
        self._turn = asyncio.Lock()
        self._is_over = asyncio.Event()
        self._error: Exception | None = None
        if self._round is not None and not duties.is_running:
            self._stop = Stop(self._round.number, "another host leads")
        if self._round is not None:
            self._slowness.begin(self._round.number)
            if duties.recorder is not None:
                since_s = self._clock() if duties.lost_s is None else duties.lost_s
                duties.recorder.took_over(self._round, takeover_s=self._clock() - since_s)

    @property
    def round(self) -> Round | None:
        """The newest."""
        return self._round

    @property
    def round_number(self) -> int:
        """Of the newest round."""
        return 0 if self._round is None else self._round.number

    @property
    def is_serving(self) -> bool:
        """It leads, or tells those that come now that the run has ended."""
        return not self.is_over or (self._end is not None and not self._has_closed)

    @property
    def is_over(self) -> bool:
        """It leads no more: the run has ended, or it stood down."""
        return self._is_over.is_set()

    async def run(self) -> None:
        """Lead until the run ends or :meth:`stand_down`; then let the members go."""
        try:
            if self.duties.lost is not None:
                host, is_certain = self.duties.lost
                silent_s = 0.0 if is_certain else self.duties.pace.deadline_s
                await self.hear(HostLost(host, is_certain, "it led, and is gone", silent_s))
            await self._lead()
            await self._until_all_left()
        finally:
            self._has_closed = True
            parting = self.parting or Parting("the run has ended")
            channels = [member.channel for member in self._members.values()]
            await asyncio.gather(*(channel.close(parting.reason, is_end=parting.is_end) for channel in channels))
            if self.duties.lines is not None:
                await asyncio.to_thread(self.duties.lines.close)
        if self._error is not None:
            raise self._error

    def stand_down(self, parting: Parting) -> None:
        """Lead no more; the members look for another leader."""
        if not self.is_over:
            self.parting = parting
            self._is_over.set()

    async def serve(self, channel: Channel, hello: Hello) -> None:
        """Attend to a member until its connection ends."""
        refusal = self._why_not(hello)
        if refusal is not None:
            channel.send({"kind": "refused", **refusal})
            return
        member, replaced = _Member(hello, channel), self._members.get(hello.host)
        if replaced is not None:
            replaced.is_replaced = True
            await replaced.channel.close("it called again")
        self._members[hello.host] = member
        self._came.add(hello.host)
        self._dead.discard(hello.host)
        channel.send({"kind": "welcome", "host": self.duties.host, "term": self.duties.term, "run": self.duties.run})
        try:
            await self._greet(member)
            loss = await self._listen(member)
        finally:
            if not member.is_replaced:
                del self._members[hello.host]
        if not member.is_replaced:
            await self.hear(loss)

    async def hear(self, event: Event) -> None:
        """Let the policy react, and do what it says."""
        async with self._turn:
            if self.is_over:
                return
            try:
                await self._react(event)
            except Exception as error:
                self._error = error
                self.stand_down(Parting(f"the leader failed: {error!r}"))

    async def _react(self, event: Event) -> None:
        duties, now_s = self.duties, self._clock()
        if isinstance(event, HostReady) and event.host in self._members:
            address = self._members[event.host].hello.address
            self._seats[event.host] = Seat(event.host, address, event.num_ranks, event.store_port)
        if isinstance(event, HostLost) and event.is_certain:
            self._dead.add(event.host)
        if duties.recorder is not None:
            duties.record(duties.recorder.hear(event, now_s))
        for slow in self._slowness.hear(event):
            duties.say(str(slow))
        if isinstance(event, HostUnhealthy):
            duties.say(f"host {event.host} is not fit to train: {event.detail}")
        actions = self._policy.react(event, now_s)
        for action in actions:
            if duties.recorder is not None:
                duties.record(duties.recorder.did(action, now_s))
            await self._carry_out(action)
            if self.is_over:
                return
        if any(not isinstance(action, Say) for action in actions):
            self._share_memory()

    def _why_not(self, hello: Hello) -> Mapping[str, Any] | None:
        """Why a host is not taken, or not yet."""
        if hello.run is not None and hello.run != self.duties.run:
            reason = f"the run here is {self.duties.run!r}, not {hello.run!r}; give all hosts the same --run"
            return {"reason": reason, "is_final": True}
        present = self._members.get(hello.host)
        if present is not None and present.hello.instance != hello.instance:
            reason = f"another agent is there as host {hello.host}; give each its own name with --host"
            return {"reason": reason}
        number = 0 if hello.round is None else hello.round.number
        if number > self.round_number:
            self.stand_down(Parting(f"host {hello.host} was in a newer round", newer=hello.round))
        elif number == self.round_number and hello.term > self.duties.term:
            self.stand_down(Parting(f"host {hello.host} had a newer leader"))
        return None if self.is_serving else {"reason": "this leader is out of date"}

    async def _greet(self, member: _Member) -> None:
        """Hear what it told an earlier leader, and tell it what stands."""
        hello, lost = member.hello, self.duties.lost
        if self._end is not None:
            member.channel.send(messages.order_to_json(self._end))
        elif hello.is_running and hello.round is not None and hello.round.number != self.round_number:
            reason = f"host {hello.host} was away, and round {self.round_number} has begun since"
            member.channel.send(messages.order_to_json(Stop(hello.round.number, reason)))
        elif hello.is_running and self._stop is not None:
            member.channel.send(messages.order_to_json(self._stop))
        if lost is not None and hello.lost == (lost[0], True) and lost[0] not in self._members:
            await self.hear(HostLost(lost[0], True, f"host {hello.host} saw it end"))
        for serial, event in hello.told:
            await self._told(member, serial, event)
        if hello.ready is not None:
            await self.hear(hello.ready)

    async def _told(self, member: _Member, serial: int, event: Event) -> None:
        """What is told again is heard once."""
        if serial > self._heard.get(member.hello.instance, 0):
            self._heard[member.hello.instance] = serial
            await self.hear(event)

    async def _listen(self, member: _Member) -> HostLost:
        """Hear what it tells, to the end of its connection; why it is lost."""
        host = member.hello.host
        try:
            while True:
                message = await member.channel.receive()
                if message.get("kind") != "told":
                    raise ConnectionError(f"a member does not say {message.get('kind')!r}")
                await self._told(member, int(message["serial"]), messages.event_from_json(message))
        except ClosedError:
            return HostLost(host, True, "its agent has ended")
        except PartedError as error:
            return HostLost(host, error.is_end, str(error))
        except (ConnectionError, KeyError, ValueError, TypeError) as error:
            await member.channel.close(str(error))
            silent_s = error.silent_s if isinstance(error, LostError) else 0.0
            return HostLost(host, False, str(error), silent_s)

    async def _lead(self) -> None:
        """Let time pass; hosts of the last round that do not come are lost."""
        pace = self.duties.pace
        started_s = shared_s = self._clock()
        awaited = set(self._hosts())
        while not self.is_over:
            await self.hear(Tick())
            now_s = self._clock()
            if awaited and now_s > started_s + pace.deadline_s:
                for host in sorted(awaited - set(self._members) - self._dead):
                    await self.hear(HostLost(host, False, "it did not come to the new leader", pace.deadline_s))
                awaited = set()
            if now_s > shared_s + _MEMORY_S:
                shared_s = now_s
                self._share_memory()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._is_over.wait(), pace.ping_s / 4)

    async def _until_all_left(self) -> None:
        """After the end of the run each member goes by itself, once it has heard of it, and some have yet to come."""
        end_s = self._clock() + self.duties.pace.deadline_s
        gone = self._dead if self.duties.lost is None else {*self._dead, self.duties.lost[0]}
        while self._end is not None and self._clock() < end_s:
            if not self._members and set(self._hosts()) <= self._came | gone:
                return
            await asyncio.sleep(self.duties.pace.ping_s / 20)

    async def _carry_out(self, action: Action) -> None:
        if isinstance(action, StartRound):
            await self._start_round(action)
        elif isinstance(action, StopRound):
            self._stop = Stop(action.number, action.reason, action.at_snapshot)
            self.duties.say(announce.stopping(action))
            for host in self._hosts():
                self._send(host, messages.order_to_json(self._stop))
        elif isinstance(action, SetAside):
            self.duties.say(f"host {action.host} takes no part any more: {action.reason}")
        elif isinstance(action, Say):
            self.duties.say(action.text)
        elif isinstance(action, EndRun):
            self._end = End(action.exit_code, action.reason)
            for host in tuple(self._members):
                self._send(host, messages.order_to_json(self._end))
            self._is_over.set()
            await note_end(self.duties, self._end)

    async def _start_round(self, action: StartRound) -> None:
        if self.duties.fence is not None:
            refusal = await claim_round(self.duties, action.number, is_void=self._is_void)
            if refusal is not None:
                self.stand_down(Parting(refusal.reason, refusal=refusal))
            if self.is_over:
                return
        seats = tuple(self._seats[host] for host in action.hosts)
        self._round = Round(action.number, seats, self.duties.run, action.reason)
        self._stop = None
        self._slowness.begin(action.number)
        self.duties.say(announce.beginning(action, self._round))
        for host in action.hosts:
            self._send(host, {"kind": "round", "round": messages.round_to_json(self._round)})
        if self.duties.recorder is not None:
            self.duties.record(self.duties.recorder.began(action, self._round, self._clock()))

    def _is_void(self, host: str) -> bool:
        """Who has claimed a round leads no more: it is dead, or a member here, and has told of all its rounds."""
        return host in self._dead or host in self._members

    def _hosts(self) -> tuple[str, ...]:
        return () if self._round is None else tuple(seat.host for seat in self._round.seats)

    def _share_memory(self) -> None:
        memory = dict(self._policy.memory(self._clock()))
        for host in tuple(self._members):
            self._send(host, {"kind": "memory", "memory": memory})

    def _send(self, host: str, message: Mapping[str, Any]) -> None:
        if host in self._members:
            self._members[host].channel.send(message)
