"""The leader by itself, with a policy that notes what it hears and connections that are queues."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.leading import messages
from lightning_dist.elastic.leading.channel import ClosedError, LostError, Pace, PartedError
from lightning_dist.elastic.leading.duties import Duties
from lightning_dist.elastic.leading.leader import Leader, Parting
from lightning_dist.elastic.leading.messages import Hello
from lightning_dist.elastic.policy.actions import Action, EndRun, Say
from lightning_dist.elastic.policy.events import EndAsked, Event, HostLost, HostReady, RoundStopped, Tick
from lightning_dist.elastic.rounds import Round, Seat

DEADLINE_S = 30.0
LAST = Round(3, (Seat("a", "10.0.0.1", 2), Seat("b", "10.0.0.2", 2)), "run")


class Noting:
    """A policy that does what it was told to, once, at an event of a kind."""

    def __init__(self, actions: Mapping[type, list[Action]] | None = None) -> None:
        self.heard: list[Event] = []
        self._actions = dict(actions or {})

    def react(self, event: Event, now_s: float) -> list[Action]:
        if isinstance(event, Tick):
            return []
        self.heard.append(event)
        return self._actions.pop(type(event), [])

    def memory(self, now_s: float) -> Mapping[str, Any]:
        return {"heard": len(self.heard)}


class Failing(Noting):
    def react(self, event: Event, now_s: float) -> list[Action]:
        raise RuntimeError("a mistake in the policy")


class Line:
    """A member's connection, as the leader sees it."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.closed: str | None = None
        self._coming: asyncio.Queue[dict[str, Any] | Exception] = asyncio.Queue()

    def say(self, what: dict[str, Any] | Exception) -> None:
        self._coming.put_nowait(what)

    def tell(self, serial: int, event: Event) -> None:
        self.say({"kind": "told", "serial": serial, **messages.event_to_json(event)})

    def send(self, message: Mapping[str, Any]) -> None:
        self.sent.append(dict(message))

    async def receive(self) -> dict[str, Any]:
        what = await self._coming.get()
        if isinstance(what, Exception):
            raise what
        return what

    async def close(self, reason: str, *, is_end: bool = False) -> None:
        if self.closed is None:
            self.closed = reason
            self.say(PartedError(reason, is_end=is_end))

    @property
    def kinds(self) -> list[str]:
        return [message["kind"] for message in self.sent if message["kind"] != "memory"]


def leader_of(policy: Any, **more: Any) -> Leader:
    said: list[str] = []
    duties = Duties("a", "x", 1, "run", Pace(0.05, 0.25), said.append, ElasticConfig(), **more)
    return Leader(duties, policy)


def serve(leader: Leader, hello: Hello, line: Line) -> asyncio.Task[None]:
    return asyncio.ensure_future(leader.serve(line, hello))  # type: ignore[arg-type]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))


def test_what_is_told_again_after_a_new_connection_is_heard_once_and_in_order() -> None:
    async def test() -> None:
        policy = Noting()
        leader = leader_of(policy, last_round=LAST, is_running=True)
        asked = [EndAsked(str(number)) for number in range(5)]
        first, second = Line(), Line()
        told = tuple(enumerate(asked[:2], start=1))
        before = serve(leader, Hello("b", "10.0.0.2", "y", told=told), first)
        first.tell(3, asked[2])
        while len(policy.heard) < 3:
            await asyncio.sleep(0)
        told = tuple(enumerate(asked[:4], start=1))
        after = serve(leader, Hello("b", "10.0.0.2", "y", told=told), second)
        await before
        second.tell(5, asked[4])
        second.say(ClosedError("its process is gone"))
        await after
        assert policy.heard == [*asked, HostLost("b", True, "its agent has ended")]
        assert first.closed == "it called again"

    run(test)


def test_a_new_process_of_a_host_is_heard_from_its_first_word() -> None:
    async def test() -> None:
        policy = Noting()
        leader = leader_of(policy)
        for instance in ("y", "z"):
            line = Line()
            line.tell(1, EndAsked(instance))
            line.say(ClosedError("gone"))
            await serve(leader, Hello("b", "10.0.0.2", instance), line)
        assert [event.detail for event in policy.heard if isinstance(event, EndAsked)] == ["y", "z"]

    run(test)


@pytest.mark.parametrize(
    ("end", "loss"),
    [
        (ClosedError("x"), HostLost("b", True, "its agent has ended")),
        (PartedError("it leaves", is_end=True), HostLost("b", True, "it leaves")),
        (PartedError("it heard nothing", is_end=False), HostLost("b", False, "it heard nothing")),
        (LostError("nothing was heard", silent_s=5.0), HostLost("b", False, "nothing was heard", 5.0)),
        ({"kind": "end"}, HostLost("b", False, "a member does not say 'end'")),
        (
            {"kind": "told", "serial": 1, "event": "Nonsense"},
            HostLost("b", False, "what was sent is no event: 'Nonsense'"),
        ),
    ],
    ids=["died", "left", "parted", "silent", "strange", "nonsense"],
)
def test_what_the_end_of_a_connection_says_of_its_host(end: Any, loss: HostLost) -> None:
    async def test() -> None:
        policy, line = Noting(), Line()
        line.say(end)
        await serve(leader_of(policy), Hello("b", "10.0.0.2", "y"), line)
        assert policy.heard == [loss]

    run(test)


@pytest.mark.parametrize(
    ("hello", "kinds"),
    [
        (Hello("b", "10.0.0.2", "y"), ["welcome"]),
        (Hello("b", "10.0.0.2", "y", round=LAST, is_running=True), ["welcome"]),
        (Hello("b", "10.0.0.2", "y", round=Round(2, LAST.seats, "run"), is_running=True), ["welcome", "stop"]),
        (Hello("b", "10.0.0.2", "y", run="other"), ["refused"]),
        (Hello("b", "10.0.0.2", "y", term=2, round=Round(2, LAST.seats, "run")), ["welcome"]),
        (Hello("b", "10.0.0.2", "y", term=2, round=LAST), ["refused"]),
        (Hello("b", "10.0.0.2", "y", round=Round(4, LAST.seats, "run"), is_running=True), ["refused"]),
    ],
    ids=["new", "in the round", "in an old round", "other run", "newer leader", "same round", "newer round"],
)
def test_what_a_host_that_calls_is_told(hello: Hello, kinds: list[str]) -> None:
    async def test() -> None:
        leader, line = leader_of(Noting(), last_round=LAST, is_running=True), Line()
        line.say(ClosedError("gone"))
        await serve(leader, hello, line)
        assert line.kinds == kinds

    run(test)


def test_a_leader_that_takes_over_hears_of_those_that_do_not_come() -> None:
    async def test() -> None:
        policy, line = Noting(), Line()
        lost = ("z", False)
        seats = (*LAST.seats, Seat("c", "", 2), Seat("z", "", 2))
        leader = leader_of(policy, last_round=Round(3, seats, "run"), is_running=True, lost=lost)
        leading = asyncio.ensure_future(leader.run())
        hello = Hello(
            "b", "10.0.0.2", "y", lost=("z", True), ready=HostReady("b", 2), told=((1, RoundStopped("b", 3)),)
        )
        serving = serve(leader, hello, line)
        while len(policy.heard) < 6:
            await asyncio.sleep(0.005)
        assert policy.heard == [
            HostLost("z", False, "it led, and is gone", 0.25),
            HostLost("z", True, "host b saw it end"),
            RoundStopped("b", 3),
            HostReady("b", 2),
            HostLost("a", False, "it did not come to the new leader", 0.25),
            HostLost("c", False, "it did not come to the new leader", 0.25),
        ]
        leader.stand_down(Parting("another one leads"))
        await leading
        await serving
        assert line.closed == "another one leads"

    run(test)


def test_the_end_of_the_run_reaches_all_and_a_mistake_ends_the_leader() -> None:
    async def test() -> None:
        line = Line()
        leader = leader_of(Noting({EndAsked: [Say("it ends"), EndRun(3, "told to")]}))
        leading = asyncio.ensure_future(leader.run())
        serving = serve(leader, Hello("b", "10.0.0.2", "y"), line)
        line.tell(1, EndAsked())
        while "end" not in line.kinds:
            await asyncio.sleep(0.005)
        line.say(PartedError("it leaves", is_end=True))
        await leading
        await serving
        assert line.sent[-1] == {"kind": "end", "exit_code": 3, "reason": "told to"}
        with pytest.raises(RuntimeError, match="a mistake in the policy"):
            await leader_of(Failing()).run()

    run(test)


def test_a_run_that_a_new_leader_ends_at_once_is_over_for_those_that_have_yet_to_come() -> None:
    """Its own host is one of them: it joins the leader that it has begun."""

    async def test() -> None:
        policy = Noting({HostLost: [EndRun(130, "SIGINT")]})
        leader = leader_of(policy, last_round=LAST, lost=("b", False))
        leading = asyncio.ensure_future(leader.run())
        while not leader.is_over:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        line = Line()
        member = serve(leader, Hello("a", "10.0.0.1", "x"), line)
        while len(line.kinds) < 2:
            await asyncio.sleep(0)
        assert line.kinds == ["welcome", "end"]
        line.say(PartedError("it has heard of it", is_end=True))
        await asyncio.gather(member, leading)

    run(test)
