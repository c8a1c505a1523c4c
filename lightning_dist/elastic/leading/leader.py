"""The leader: hears all agents, asks the policy, and does what it says.

One event at a time: what the policy makes of it is done before the next is heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_dist.elastic.leading import messages
from lightning_dist.elastic.leading.channel import Channel, ClosedError, Pace, PartedError
from lightning_dist.elastic.leading.messages import Hello
from lightning_dist.elastic.leading.store import RoundStore, open_store
from lightning_dist.elastic.policy.actions import Action, EndRun, Say, SetAside, StartRound, StopRound
from lightning_dist.elastic.policy.events import Event, HostLost, HostReady, Tick
from lightning_dist.elastic.rounds import Round, Seat
from lightning_dist.elastic.session import End, Stop

_MEMORY_S = 10.0  # the next leader's picture of restarts and failures is at most so old


class Reactor(Protocol):
    """The policy, as the leader sees it."""

    def react(self, event: Event, now_s: float) -> list[Action]:
        """What is to be done about an event."""

    def memory(self, now_s: float) -> Mapping[str, Any]:
        """What the next leader's policy is to know, as JSON."""


@dataclass(frozen=True)
class Duties:
    """Who leads, and with what.

    Attributes:
        host: The leader's host.
        address: Under which others reach it; the rounds' stores are there.
        term: The number of this leader, from 1.
        run: The run's name.
        pace: Of the members' connections.
        say: Tells people.
        last_round: The newest round there was, with its number; its hosts are awaited.
        lost: The leader before this one, and whether it is known to be dead.
        clock: Seconds, from any start.
    """

    host: str
    address: str
    term: int
    run: str
    pace: Pace
    say: Callable[[str], None]
    last_round: Round | None = None
    lost: tuple[str, bool] | None = None
    clock: Callable[[], float] = time.monotonic


@dataclass
class _Member:
    hello: Hello
    channel: Channel
    is_replaced: bool = field(default=False)


class Leader:
    """See the module. All calls are made in the loop's thread.

    Args:
        duties: Who leads.
        policy: Decides.
    """

    def __init__(self, duties: Duties, policy: Reactor) -> None:
        self.duties = duties
        self._policy = policy
        self._clock = duties.clock
        self._members: dict[str, _Member] = {}
        self._seats: dict[str, Seat] = {}
        self._round = duties.last_round
        self._stop: Stop | None = None
        self._end: End | None = None
        self._store: RoundStore | None = None
        self._turn = asyncio.Lock()
        self._is_over = asyncio.Event()
        self._parting = ("the run has ended", False)
        self._error: Exception | None = None

    @property
    def round_number(self) -> int:
        """Of the newest round."""
        return 0 if self._round is None else self._round.number

    @property
    def members(self) -> frozenset[str]:
        """Hosts that are connected."""
        return frozenset(self._members)

    @property
    def is_over(self) -> bool:
        """It leads no more: the run has ended, or it stood down."""
        return self._is_over.is_set()

    async def run(self) -> None:
        """Lead until the run ends or :meth:`stand_down`; then let the members go."""
        try:
            await self._take_over()
            await self._lead()
            await self._until_all_left()
        finally:
            reason, is_end = self._parting
            await asyncio.gather(*(member.channel.close(reason, is_end=is_end) for member in self._members.values()))
            self._store = None
        if self._error is not None:
            raise self._error

    def stand_down(self, reason: str, *, is_end: bool = False) -> None:
        """Lead no more; the members look for another leader.

        Args:
            reason: For people.
            is_end: This host has no part in the run any more.
        """
        if not self.is_over:
            self._parting = (reason, is_end)
            self._is_over.set()

    async def serve(self, channel: Channel, hello: Hello) -> None:
        """Attend to a member until its connection ends."""
        if hello.term > self.duties.term:
            self.stand_down(f"host {hello.host} had a newer leader")
            channel.send({"kind": "refused", "reason": "this leader is out of date"})
            return
        if (reason := self._why_not(hello)) is not None:
            channel.send({"kind": "refused", "is_final": True, "reason": reason})
            return
        member = _Member(hello, channel)
        replaced = self._members.get(hello.host)
        self._members[hello.host] = member
        if replaced is not None:
            replaced.is_replaced = True
            await replaced.channel.close("it called again")
            if replaced.hello.instance != hello.instance:
                await self.hear(HostLost(hello.host, True, "its agent was started anew"))
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
            if isinstance(event, HostReady) and event.host in self._members:
                address = self._members[event.host].hello.address
                self._seats[event.host] = Seat(event.host, address, event.num_ranks)
            try:
                actions = self._policy.react(event, self._clock())
                for action in actions:
                    await self._carry_out(action)
            except Exception as error:
                self._error = error
                self.stand_down(f"the leader failed: {error!r}")
                return
            if any(not isinstance(action, Say) for action in actions):
                self._share_memory()

    def _why_not(self, hello: Hello) -> str | None:
        if hello.run is not None and hello.run != self.duties.run:
            return f"the run here is {self.duties.run!r}, not {hello.run!r}; give all hosts the same --run"
        return None

    async def _greet(self, member: _Member) -> None:
        """Hear what it told an earlier leader, and tell it what stands."""
        hello, number = member.hello, 0 if member.hello.round is None else member.hello.round.number
        if self._end is not None:
            member.channel.send(messages.order_to_json(self._end))
        elif hello.is_running and number != self.round_number:
            reason = f"host {hello.host} was away, and round {self.round_number} has begun since"
            member.channel.send(messages.order_to_json(Stop(number, reason)))
        elif hello.is_running and self._stop is not None:
            member.channel.send(messages.order_to_json(self._stop))
        if self.duties.lost is not None and hello.lost == (self.duties.lost[0], True) and not self.duties.lost[1]:
            await self.hear(HostLost(hello.lost[0], True, f"host {hello.host} saw it end"))
        for event in hello.told:
            await self.hear(event)
        if (ready := messages.ready_event(hello)) is not None:
            await self.hear(ready)

    async def _listen(self, member: _Member) -> HostLost:
        """Hear what it tells, to the end of its connection; why it is lost."""
        host = member.hello.host
        try:
            while True:
                message = await member.channel.receive()
                if message.get("kind") != "told":
                    raise ConnectionError(f"a member does not say {message.get('kind')!r}")
                await self.hear(messages.event_from_json(message))
        except ClosedError:
            return HostLost(host, True, "its agent has ended")
        except PartedError as error:
            return HostLost(host, error.is_end, str(error))
        except ConnectionError as error:
            await member.channel.close(str(error))
            return HostLost(host, False, str(error))

    async def _take_over(self) -> None:
        if self.duties.lost is not None:
            host, is_certain = self.duties.lost
            await self.hear(HostLost(host, is_certain, "it led, and is gone"))

    async def _lead(self) -> None:
        """Let time pass; hosts of the last round that do not come are lost."""
        pace = self.duties.pace
        started_s = shared_s = self._clock()
        awaited = {seat.host for seat in self._round.seats} if self._round is not None else set()
        while not self.is_over:
            await self.hear(Tick())
            now_s = self._clock()
            if awaited and now_s > started_s + pace.deadline_s:
                for host in sorted(awaited - self.members - {self.duties.lost[0] if self.duties.lost else ""}):
                    await self.hear(HostLost(host, False, "it did not come to the new leader"))
                awaited = set()
            if now_s > shared_s + _MEMORY_S:
                shared_s = now_s
                self._share_memory()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._is_over.wait(), pace.ping_s / 4)

    async def _until_all_left(self) -> None:
        """After the end of the run each member goes by itself, once it has heard of it."""
        end_s = self._clock() + self.duties.pace.deadline_s
        while self._end is not None and self._members and self._clock() < end_s:
            await asyncio.sleep(self.duties.pace.ping_s / 20)

    async def _carry_out(self, action: Action) -> None:
        if isinstance(action, StartRound):
            await self._start_round(action)
        elif isinstance(action, StopRound):
            self._stop = Stop(action.number, action.reason, action.at_snapshot)
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

    async def _start_round(self, action: StartRound) -> None:
        store = await asyncio.to_thread(open_store, self.duties.address)
        seats = tuple(self._seats[host] for host in action.hosts)
        run, reason = self.duties.run, action.reason
        self._round = Round(action.number, seats, self.duties.address, store.port, run, reason)
        self._stop = None
        self._store = store  # the one of the round before ends here: its ranks have ended
        for host in action.hosts:
            self._send(host, {"kind": "round", "round": messages.round_to_json(self._round)})

    def _hosts(self) -> tuple[str, ...]:
        return () if self._round is None else tuple(seat.host for seat in self._round.seats)

    def _share_memory(self) -> None:
        memory = dict(self._policy.memory(self._clock()))
        for host in tuple(self._members):
            self._send(host, {"kind": "memory", "memory": memory})

    def _send(self, host: str, message: Mapping[str, Any]) -> None:
        if host in self._members:
            self._members[host].channel.send(message)
