"""Whatever is heard, in whatever order, some things never happen, and nothing waits for ever."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.policy.actions import EndRun, SetAside, StartRound, StopRound
from lightning_dist.elastic.policy.events import (
    Cause,
    EndAsked,
    Event,
    FirstStep,
    HostLeaves,
    HostLost,
    HostReady,
    HostUnhealthy,
    RoundDone,
    RoundStopped,
    SizesTold,
    Snapshot,
    Tick,
    WorkerFailed,
)
from lightning_dist.elastic.policy.machine import Policy
from lightning_dist.elastic.policy.situation import Presence, State, Waits
from lightning_dist.elastic.policy.sizes import Sizes
from tests.unit.elastic.fleet import Fleet

WAITS = Waits()
HOSTS = st.sampled_from("abcd")
OPTIONS = st.builds(
    ElasticConfig,
    mode=st.sampled_from(["off", "restart", "degrade", "degrade", "degrade"]),
    max_restarts=st.integers(0, 4),
    window_s=st.sampled_from([100.0, 1000.0]),
    host_failures=st.integers(1, 3),
    rejoin_s=st.sampled_from([0.0, 50.0]),
    regrow=st.booleans(),
    start_s=st.just(100.0),
    save_s=st.just(100.0),
)
FITTING = st.sampled_from([Sizes(), Sizes(), Sizes(multiple=4), Sizes(multiple=3)])  # of hosts with two ranks each
SIZES = st.tuples(st.integers(1, 3), st.integers(0, 2)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@dataclass(frozen=True)
class Said:
    """An event but for its round, which is the present one, or one off; some are said by all members at once."""

    kind: type
    host: str
    after_s: float
    off: int
    cause: Cause
    flag: bool

    def events(self, number: int, members: tuple[str, ...]) -> list[Event]:
        number += self.off
        hosts = members if self.flag else (self.host,)
        return {
            HostReady: lambda: [HostReady(host, 2) for host in hosts],
            HostLost: lambda: [HostLost(self.host, self.flag)],
            HostLeaves: lambda: [HostLeaves(self.host)],
            HostUnhealthy: lambda: [HostUnhealthy(self.host, "")],
            WorkerFailed: lambda: [WorkerFailed(self.host, number, 0, self.cause, is_consequence=self.flag)],
            RoundStopped: lambda: [RoundStopped(host, number) for host in hosts],
            RoundDone: lambda: [RoundDone(self.host, number)],
            FirstStep: lambda: [FirstStep(host, number, 1) for host in hosts],
            Snapshot: lambda: [Snapshot(number, 1)],
            EndAsked: lambda: [EndAsked()],
            Tick: lambda: [Tick()],
        }[self.kind]()


# What brings a run forward is said more often than what ends it, so that walks are long.
KINDS = [
    *[HostReady] * 16, *[FirstStep] * 8, *[RoundStopped] * 12, *[WorkerFailed] * 5, *[Tick] * 8, *[Snapshot] * 4,
    *[HostLost] * 3, HostLeaves, HostUnhealthy, RoundDone, EndAsked,
]  # fmt: skip
SAID = st.builds(
    Said,
    kind=st.sampled_from(KINDS),
    host=HOSTS,
    after_s=st.sampled_from([0.0, 0.0, 0.0, 1.0, 31.0]),
    off=st.sampled_from([0] * 9 + [-1, 1]),
    cause=st.sampled_from(Cause),
    flag=st.booleans(),
)


class Observer:
    """Keeps its own books of what was said, and holds each order against them."""

    def __init__(self, options: ElasticConfig, sizes: tuple[int, int], fitting: Sizes) -> None:
        self.policy = Policy(options, min_hosts=sizes[0], max_hosts=sizes[1], host="a", waits=WAITS)
        self.options, self.sizes, self.fitting = options, sizes, fitting
        self.now_s = 0.0
        self.ready: set[str] = set()
        self.leaving: set[str] = set()
        self.aside: set[str] = set()
        self.here: set[str] = set()
        self.dead: set[str] = set()
        self.running: set[str] = set()  # hosts of the round that nobody has heard to be without ranks
        self.stopped_s: float | None = None
        self.rounds: list[StartRound] = []
        self.restarts_s: list[float] = []
        self.ends: list[EndRun] = []
        self.states: set[State] = set()
        self.hear(SizesTold(fitting))

    def hear(self, event: Event) -> None:
        self._book(event)
        for action in self.policy.react(event, self.now_s):
            assert not self.ends, "an order after the end"
            if isinstance(action, StartRound):
                self._check_start(action)
            elif isinstance(action, StopRound):
                assert action.number == len(self.rounds)
                self.stopped_s = self.now_s
            elif isinstance(action, SetAside):
                self.aside.add(action.host)
            elif isinstance(action, EndRun):
                self.ends.append(action)
        self.states.add(self.policy.situation.state)
        assert (self.policy.situation.state is State.ENDED) == bool(self.ends)

    def _book(self, event: Event) -> None:
        number = len(self.rounds)
        host = getattr(event, "host", "")
        is_present_round = getattr(event, "round", None) == number
        if isinstance(event, HostReady) and host not in self.leaving:
            self.ready.add(host)
            self.running.discard(host)
        elif isinstance(event, HostLost):
            for books in (self.ready, self.leaving, self.here, self.running):
                books.discard(host)
            self.dead.update({host} if event.is_certain else ())
        elif isinstance(event, HostLeaves) and (host in self.here or not self._is_lost(host)):
            self.leaving.add(host)
        elif isinstance(event, HostUnhealthy):
            self.ready.discard(host)
        elif isinstance(event, (RoundStopped, RoundDone)) and is_present_round:
            self.running.discard(host)
        was_slow = isinstance(event, RoundStopped) and is_present_round and host not in self.dead
        if isinstance(event, (HostReady, HostUnhealthy)) or was_slow:
            self.here.add(host)
            self.dead.discard(host)

    def _is_lost(self, host: str) -> bool:
        known = self.policy.situation.hosts.get(host)
        return known is not None and known.presence in (Presence.SILENT, Presence.GONE)

    def _check_start(self, action: StartRound) -> None:
        hosts = set(action.hosts)
        assert action.number == len(self.rounds) + 1
        assert len(hosts) == len(action.hosts)
        assert self.sizes[0] <= len(hosts) <= self.sizes[1]
        assert self.fitting.fit([2] * len(hosts))
        assert hosts <= self.ready - self.leaving - self.aside
        was_late = self.stopped_s is not None and self.now_s - self.stopped_s >= WAITS.stop_s
        assert not self.running or was_late, "two rounds at once"
        if self.rounds:
            last = set(self.rounds[-1].hosts) - self.dead
            assert 2 * len(last & self.here) >= len(last), "no quorum"  # the leader is always this one
            if self.options.mode != "degrade":
                assert len(hosts) == len(self.rounds[0].hosts)
        if action.blame is not None and action.blame.cause is not Cause.PREEMPTED:
            self.restarts_s.append(self.now_s)
            recent = [time_s for time_s in self.restarts_s if self.now_s - time_s < self.options.window_s]
            # A restart is counted when its round has stopped, some waits before the next begins.
            assert self.options.max_restarts > 0
            if self.now_s - recent[0] < self.options.window_s - WAITS.ready_s - WAITS.patience_s:
                assert len(recent) <= self.options.max_restarts
        assert self.options.mode != "off" or action.blame is None
        self.rounds.append(action)
        self.ready -= hosts
        self.running = set(hosts)
        self.stopped_s = None


def walk(options: ElasticConfig, sizes: tuple[int, int], fitting: Sizes, saids: list[Said]) -> Observer:
    observer = Observer(options, sizes, fitting)
    for said in saids:
        observer.now_s += said.after_s
        for event in said.events(len(observer.rounds), observer.policy.situation.members):
            observer.hear(event)
    return observer


def come_to_rest(observer: Observer) -> None:
    """Nobody says anything any more; each wait has an end, and a walk has at most a few of them in a row."""
    for _ in range(200):
        observer.now_s += 10.0
        observer.hear(Tick())


@given(options=OPTIONS, sizes=SIZES, fitting=FITTING, saids=st.lists(SAID, max_size=60))
@settings(max_examples=300, deadline=None)
def test_some_things_never_happen(
    options: ElasticConfig, sizes: tuple[int, int], fitting: Sizes, saids: list[Said]
) -> None:
    observer = walk(options, sizes, fitting, saids)
    come_to_rest(observer)
    assert observer.policy.situation.state in (State.RUNNING, State.ENDED)


WEIGHTS = {
    HostReady: 8, FirstStep: 12, RoundStopped: 12, WorkerFailed: 3, Tick: 8, Snapshot: 6, HostLost: 3, HostLeaves: 0.5,
    HostUnhealthy: 1, RoundDone: 0.5, EndAsked: 0.1,
}  # fmt: skip


def drawn_walk(seed: int) -> Observer:
    """A long walk that gets further than hypothesis' short ones: most of what is said fits the round."""
    draw = random.Random(seed)
    options = ElasticConfig(
        mode=draw.choice(["off", "restart", "degrade", "degrade", "degrade"]), max_restarts=draw.choice([1, 20]),
        window_s=draw.choice([100.0, 1000.0]), host_failures=draw.choice([2, 9]), rejoin_s=draw.choice([0.0, 50.0]),
        start_s=100.0, save_s=100.0,
    )  # fmt: skip
    low = draw.randint(1, 3)
    kinds = draw.choices(list(WEIGHTS), list(WEIGHTS.values()), k=120)
    saids = [
        Said(
            kind=kind, host=draw.choice("abcd"), after_s=draw.choice([0.0, 0.0, 1.0, 10.0]),
            off=draw.choice([0] * 19 + [-1]), cause=draw.choice(list(Cause)), flag=draw.random() < 0.6,
        )
        for kind in kinds
    ]  # fmt: skip
    sizes = (low, low + draw.randint(0, 2))
    return walk(options, sizes, Sizes(multiple=draw.choice([1, 1, 1, 4])), saids)


def test_long_walks_reach_all_states_and_kinds_of_rounds() -> None:
    """What never happens in walks that go nowhere would say nothing."""
    seen: Counter[str] = Counter()
    for seed in range(200):
        observer = drawn_walk(seed)
        for what in [*[state.value for state in observer.states], *[action.action for action in observer.rounds]]:
            seen[what] += 1
        come_to_rest(observer)
        assert observer.policy.situation.state in (State.RUNNING, State.ENDED), seed
    states = {state.value for state in State}
    assert {what for what, times in seen.items() if times >= 3} == states | {
        "started", "restarted", "waited", "degraded", "regrown",
    }, seen  # fmt: skip


@pytest.mark.sweep
def test_many_long_walks() -> None:
    for seed in range(1000, 6000):
        observer = drawn_walk(seed)
        come_to_rest(observer)
        assert observer.policy.situation.state in (State.RUNNING, State.ENDED), seed


FAULTS = st.lists(
    st.tuples(st.sampled_from(["rank", "lost", "silent", "leaves", "back", "unhealthy"]), HOSTS), max_size=25
)


@given(faults=FAULTS, has_fence=st.booleans())
@settings(max_examples=200, deadline=None)
def test_whatever_fails_the_run_goes_on_with_all_that_are_left(faults: list[tuple[str, str]], has_fence: bool) -> None:
    options = {"max_restarts": 1000, "host_failures": 1000}
    fleet = Fleet("degrade", hosts=(1, 4), options=options, has_fence=has_fence, waits=Waits(patience_s=1e6))
    fleet.come(*"abcd")
    for kind, host in faults:
        if kind == "rank":
            fleet.fail(host)
        elif kind == "lost":
            fleet.lose(host)
        elif kind == "silent":
            fleet.lose(host, is_certain=False)
        elif kind == "leaves" and host not in fleet.away:
            fleet.leaving.add(host)
            fleet.tell(HostLeaves(host))
            fleet.leaving.discard(host)
            fleet.lose(host)
        elif kind == "back" and host in fleet.away:
            fleet.come(host)
        elif kind == "unhealthy" and host not in fleet.away:
            fleet.tell(HostUnhealthy(host, "memory"))
            fleet.come(host)
        if fleet.state is State.ENDED:  # all were told to end
            assert fleet.end.exit_code == 143
            return
        fleet.step()
        fleet.save()
        fleet.wait(1)
    if set("abcd") == fleet.away:
        return
    for _ in range(4):  # what was interrupted is started anew, and who is back takes part at a snapshot
        fleet.wait(20)
        fleet.step()
        fleet.save()
    there = set("abcd") - fleet.away
    if has_fence or fleet.policy.situation.side.is_only_one:
        assert fleet.state in (State.RUNNING, State.STARTING)
        assert set(fleet.members) == there
    else:
        assert fleet.state is State.WAITING
