"""What an incident was and what it cost, from what the leader hears and does. Pure; the clocks are handed in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from lightning_dist.elastic.policy.actions import Action, EndRun, StartRound, StopRound
from lightning_dist.elastic.policy.blame import Blame
from lightning_dist.elastic.policy.events import (
    Cause,
    Event,
    FirstStep,
    HostLeaves,
    HostLost,
    Progress,
    RoundDone,
    RoundStopped,
    Snapshot,
    WorkerFailed,
)
from lightning_dist.elastic.rounds import Round
from lightning_dist.incidents import Incident


@dataclass
class _Open:
    """An incident that is not over.

    Attributes:
        time: When it was noticed, seconds since the epoch.
        noticed_s: The same, on the leader's clock.
        stopped_s: When the last ranks had ended.
        silent_s: By host and cause, from the last sign of life until it was noticed.
        takeover_s: From then until another leader led; ``None``: none had to.
        has_left: A host was told to end.
    """

    time: float
    noticed_s: float
    stopped_s: float
    silent_s: dict[tuple[str, Cause], float] = field(default_factory=dict)
    takeover_s: float | None = None
    has_left: bool = False
    step_before: int | None = None
    round_before: Round | None = None
    written: Incident | None = None


class Recorder:
    """See the module. Each call gives the incident that has changed, if one has.

    Args:
        run: The run's name.
        first_number: Of the next incident.
        wall_clock: Seconds since the epoch.
    """

    def __init__(self, run: str, *, first_number: int, wall_clock: Callable[[], float]) -> None:
        self._run = run
        self._number = first_number - 1
        self._wall_clock = wall_clock
        self._round: Round | None = None
        self._step: int | None = None
        self._open: _Open | None = None
        self._takeover_s = 0.0  # until the first loss is told, which is that of the leader before
        self._waiting: set[str] = set()  # hosts of the round that have not done its first step
        self._started: dict[str, float] = {}  # the slowest host's seconds to each point

    def took_over(self, value: Round, *, takeover_s: float = 0.0) -> None:
        """A round of an earlier leader goes on.

        Args:
            value: The round.
            takeover_s: From the loss of that leader until this one led, in seconds.
        """
        self._round, self._takeover_s = value, takeover_s

    def hear(self, event: Event, now_s: float) -> Incident | None:
        """The leader has heard something."""
        if isinstance(event, Progress | Snapshot | FirstStep | RoundStopped) and event.step is not None:
            self._done(event.round, event.step)
        if isinstance(event, FirstStep):
            return self._stepped(event)
        if isinstance(event, RoundStopped | RoundDone) and self._open is not None:
            self._open.stopped_s = now_s
        elif isinstance(event, WorkerFailed) and self._is_in(event.host, event.round):
            self._noticed(now_s).silent_s.setdefault((event.host, event.cause), event.silent_s)
        elif isinstance(event, HostLost) and self._is_in(event.host):
            opened = self._noticed(now_s)
            if self._takeover_s:
                opened.takeover_s, self._takeover_s = self._takeover_s, 0.0
            opened.silent_s.setdefault((event.host, Cause.HOST_LOST), event.silent_s)
            opened.stopped_s = now_s
        elif isinstance(event, HostLeaves) and self._is_in(event.host):
            self._noticed(now_s).has_left = True
        return None

    def did(self, action: Action, now_s: float) -> Incident | None:
        """The leader is about to do something."""
        if isinstance(action, StopRound):
            self._noticed(now_s)
        if isinstance(action, EndRun) and (action.exit_code != 0 or action.blame is not None):
            opened = self._noticed(now_s)
            return self._write(opened, action.blame, action="ended", reason=action.reason, now_s=now_s)
        return None

    def began(self, action: StartRound, value: Round, now_s: float) -> Incident | None:
        """A round has begun: its hosts were told."""
        opened, self._round = self._open, value
        self._waiting, self._started = {seat.host for seat in value.seats}, {}
        if opened is None or action.action == "started":
            self._open = None
            return None
        return self._write(opened, action.blame, action=action.action, reason=action.reason, now_s=now_s)

    def _is_in(self, host: str, number: int | None = None) -> bool:
        value = self._round
        if value is None or (number is not None and number != value.number):
            return False
        return any(seat.host == host for seat in value.seats)

    def _done(self, number: int, step: int) -> None:
        if self._round is not None and number == self._round.number and not self._waiting:
            self._step = max(step, self._step or 0)

    def _noticed(self, now_s: float) -> _Open:
        if self._open is None or self._open.written is not None:
            self._open = _Open(self._wall_clock(), now_s, now_s, step_before=self._step, round_before=self._round)
        return self._open

    def _write(self, opened: _Open, blame: Blame | None, *, action: str, reason: str, now_s: float) -> Incident:
        before = opened.round_before
        has_ended = action == "ended"
        self._number += 1
        opened.step_before = self._step  # what was told while the ranks were stopped counts
        opened.written = Incident(
            number=self._number,
            what=_what(blame, action, has_left=opened.has_left),
            who=_who(blame, before, None if has_ended else self._round),
            detail=reason if blame is None else blame.detail or reason,
            time=opened.time,
            action=action,
            seconds={
                **({} if blame is None else self._detect(opened, blame)),
                **({} if opened.takeover_s is None else {"takeover": opened.takeover_s}),
                "stop": opened.stopped_s - opened.noticed_s,
                "regroup": now_s - opened.stopped_s,
            },
            step_before=opened.step_before,
            ranks_before=0 if before is None else before.world_size,
            ranks_after=0 if has_ended or self._round is None else self._round.world_size,
            lost_ranks=_lost(blame, before),
            blamed_host=blame.host if blame is not None and blame.is_hosts_fault else None,
            run=self._run,
        )
        return opened.written

    def _detect(self, opened: _Open, blame: Blame) -> Mapping[str, float]:
        silent_s = opened.silent_s.get((blame.host or "", blame.cause))
        return {} if silent_s is None else {"detect": silent_s}

    def _stepped(self, event: FirstStep) -> Incident | None:
        """All hosts have to have done the first step; the slowest counts."""
        if self._round is None or event.round != self._round.number or event.host not in self._waiting:
            return None
        self._waiting.discard(event.host)
        own = {"start": event.start_s, "load": event.load_s, "first_step": event.first_step_s}
        if sum(value or 0 for value in own.values()) >= sum(self._started.values()):
            self._started = {name: value for name, value in own.items() if value is not None}
        if self._waiting:
            return None
        opened, self._open, self._step = self._open, None, event.step
        if opened is None or opened.written is None:
            return None
        seconds = {**opened.written.seconds, **self._started}
        return replace(opened.written, seconds=seconds, step_after=event.step - 1)


def _what(blame: Blame | None, action: str, *, has_left: bool) -> str:
    if blame is not None:
        return blame.cause.value
    if action == "regrown":
        return "regrown"
    return Cause.PREEMPTED.value if has_left else "asked"


def _lost(blame: Blame | None, before: Round | None) -> tuple[int, ...]:
    """Of a lost host all ranks."""
    if blame is None or before is None:
        return ()
    hosts = {seat.host: seat for seat in before.seats}
    if blame.ranks or blame.host not in hosts:
        return blame.ranks
    first = before.first_rank(blame.host)
    return tuple(range(first, first + hosts[blame.host].num_ranks))


def _who(blame: Blame | None, before: Round | None, after: Round | None) -> str:
    """Who failed; else the hosts that came or went."""
    if blame is None:
        hosts = [{seat.host for seat in value.seats} if value is not None else set() for value in (before, after)]
        changed = sorted(hosts[0] ^ hosts[1])
        return f"host{'s' if len(changed) > 1 else ''} {', '.join(changed)}" if changed else "all hosts"
    ranks = _lost(blame, before)
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
    return " on ".join(part for part in (names, f"host {blame.host}" if blame.host else "") if part) or "all hosts"
