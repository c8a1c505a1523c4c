"""What is done in each state, by what is known: one rule a state, tried until none applies any more. Pure.

A rule looks at facts, never at the event that brought them, so that it does not matter in which order they came. Every
state but running has a time after which it ends by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_dist.elastic.policy import quorum
from lightning_dist.elastic.policy.actions import Action, EndRun, Say, SetAside, StartRound, StopRound
from lightning_dist.elastic.policy.blame import PREEMPTED_EXIT_CODE, Blame, Failure, blame
from lightning_dist.elastic.policy.events import Cause
from lightning_dist.elastic.policy.situation import TRANSITIONS, Presence, Progress, Situation, State

_FRUITLESS_ROUNDS = 3  # a script that cannot start is not started again for ever
_AT_ONCE_S = 60.0  # what takes longer may have been work, by a script that tells nothing of its steps


@dataclass(frozen=True)
class Move:
    """What follows from a situation: the next one, and what is to be done."""

    situation: Situation
    actions: tuple[Action, ...] = ()


def settle(situation: Situation, now_s: float) -> Move:
    """What is to be done now, rule after rule, until nothing more is."""
    actions: list[Action] = []
    while (move := _set_aside(situation, now_s) or RULES[situation.state](situation, now_s)) is not None:
        if move.situation.state is not situation.state:
            assert move.situation.state in TRANSITIONS[situation.state], (situation.state, move.situation.state)
        situation = move.situation
        actions.extend(move.actions)
    return Move(situation, tuple(actions))


def _gathering(situation: Situation, now_s: float) -> Move | None:
    terms, waits = situation.terms, situation.terms.waits
    if situation.ending is not None:
        return _end(situation, now_s, situation.ending.exit_code, situation.ending.reason)
    ready = situation.candidates
    has_waited = situation.enough_s is not None and now_s - situation.enough_s >= waits.join_s
    has_enough = len(situation.seating(ready)) >= terms.min_hosts
    if has_enough and (len(ready) >= terms.max_hosts or has_waited):
        move = _start_if_alone(situation, now_s, f"{min(len(ready), terms.max_hosts)} hosts are there")
        if move is not None:
            return move
    if now_s - situation.since_s < waits.gather_s:
        return None
    if has_enough:
        return _end(situation, now_s, 1, quorum.explain(situation.side))
    if len(ready) >= terms.min_hosts:
        return _end(situation, now_s, 1, _shortage(situation, waits.gather_s))
    names = f" ({', '.join(ready)})" if ready else ""
    return _end(
        situation, now_s, 1,
        f"{len(ready)} hosts{names} were ready within {waits.gather_s:g} s, and at least {terms.min_hosts} are needed: "
        "start hierdist launch on the others, or lower MIN of --hosts MIN:MAX",
    )  # fmt: skip


def _starting(situation: Situation, now_s: float) -> Move | None:
    move = _interrupted(situation, now_s)
    if move is not None:
        return move
    progress = situation.progress
    missing = [name for name in situation.members if name not in progress.stepped | progress.done]
    if not missing:
        return _to(situation, State.RUNNING, now_s)
    leaving = progress.left & set(situation.members)
    if leaving:  # it has nothing yet that a snapshot could save
        return _stop(situation, now_s, f"{_names(leaving)} was told to end")
    limit_s = situation.options.start_s + situation.terms.waits.stop_s
    if now_s - situation.since_s < limit_s:
        return None
    if not progress.stepped:  # a script without heartbeat says nothing of its steps
        return _to(situation, State.RUNNING, now_s)
    detail = f"within {limit_s:g} s, and {_names(progress.stepped)} has"
    failures = tuple(Failure(Cause.START, host, detail=detail) for host in missing)
    progress = replace(progress, failures=(*progress.failures, *failures))
    return _stop(replace(situation, progress=progress), now_s, _cause(failures).text)


def _running(situation: Situation, now_s: float) -> Move | None:
    move = _interrupted(situation, now_s)
    if move is not None:
        return move
    leaving = situation.progress.left & set(situation.members)
    if leaving:
        return _drain(situation, now_s, f"{_names(leaving)} was told to end")
    has_snapshot = situation.progress.snapshot_step is not None
    waited = now_s - situation.since_s >= situation.terms.waits.snapshot_s
    if _may_grow(situation) and (has_snapshot or waited):
        return _drain(situation, now_s, f"{_names(situation.spares)} is there, and takes part")
    return None


def _draining(situation: Situation, now_s: float) -> Move | None:
    if situation.ending is not None and situation.ending.is_urgent:
        return _end(situation, now_s, situation.ending.exit_code, situation.ending.reason)
    if situation.progress.failures:
        return _stop(situation, now_s, _cause(situation.progress.failures).text)
    if not situation.outstanding:
        return _settled(situation, now_s)
    limit_s = situation.options.save_s + situation.terms.waits.stop_s
    if now_s - situation.since_s >= limit_s:
        return _stop(situation, now_s, f"{situation.reason}; no snapshot within {limit_s:g} s")
    return None


def _stopping(situation: Situation, now_s: float) -> Move | None:
    if situation.ending is not None and situation.ending.is_urgent:
        return _end(situation, now_s, situation.ending.exit_code, situation.ending.reason)
    late = situation.outstanding
    if not late:
        return _settled(situation, now_s)
    if now_s - situation.since_s < situation.terms.waits.stop_s:
        return None
    detail = f"has not ended its ranks within {situation.terms.waits.stop_s:g} s"
    failures = tuple(Failure(Cause.HOST_LOST, name, detail=detail) for name in late)
    progress = replace(situation.progress, failures=(*situation.progress.failures, *failures))
    hosts = {name: replace(situation.hosts[name], presence=Presence.SILENT) for name in late}
    return Move(
        replace(situation, progress=progress, hosts={**situation.hosts, **hosts}), (Say(f"{_names(late)} {detail}"),)
    )


def _waiting(situation: Situation, now_s: float) -> Move | None:
    if situation.ending is not None:
        return _end(situation, now_s, situation.ending.exit_code, situation.ending.reason)
    options, waits = situation.options, situation.terms.waits
    waited_s = now_s - situation.since_s
    num_ready = len(situation.seating(situation.candidates))
    is_coming = bool(situation.coming) and waited_s < waits.ready_s
    is_full = num_ready >= min(situation.ceiling, len(situation.members))
    may_return = bool(situation.missed) and not is_full and waited_s < options.rejoin_s
    if num_ready >= situation.floor and not is_coming and not may_return:
        move = _start_if_alone(situation, now_s, situation.reason)
        if move is not None:
            return move
    is_short = num_ready < situation.floor
    limit_s = _patience_s(situation, is_short=is_short)
    if is_coming:
        return None
    if waited_s < limit_s:
        return _say_misfit(situation, limit_s - waited_s) if is_short else None
    code = (
        situation.blame.exit_code
        if situation.blame is not None
        else PREEMPTED_EXIT_CODE
        if situation.progress.left
        else 1
    )
    reason = _shortage(situation, limit_s) if is_short else quorum.explain(situation.side)
    return _end(situation, now_s, code, f"{situation.reason}; {reason}", blamed=situation.blame)


def _say_misfit(situation: Situation, left_s: float) -> Move | None:
    """Tell once why those that are there are not started."""
    ready = situation.candidates
    if situation.has_said_misfit or len(ready) < situation.floor:
        return None
    misfit = situation.sizes.explain(situation.ranks_of(ready), situation.terms.max_hosts)
    text = f"{misfit}. Other hosts are waited for, {left_s:.0f} s at most"
    return Move(replace(situation, has_said_misfit=True), (Say(text),))


def _patience_s(situation: Situation, *, is_short: bool) -> float:
    """How long is waited for hosts without which nothing can go on, in seconds."""
    options, terms = situation.options, situation.terms
    if is_short and len(situation.candidates) >= terms.max_hosts:  # all that there can be, and their ranks do not fit
        return 0.0
    if is_short and options.mode != "degrade":
        return options.rejoin_s
    return max(options.rejoin_s, terms.waits.patience_s)


def _ended(situation: Situation, now_s: float) -> Move | None:
    return None


RULES: Mapping[State, Callable[[Situation, float], Move | None]] = {
    State.GATHERING: _gathering,
    State.STARTING: _starting,
    State.RUNNING: _running,
    State.DRAINING: _draining,
    State.STOPPING: _stopping,
    State.WAITING: _waiting,
    State.ENDED: _ended,
}


def _set_aside(situation: Situation, now_s: float) -> Move | None:
    """Leave out a host that has failed too often, if there are enough without it."""
    if situation.state is State.ENDED:
        return None
    for name, host in situation.hosts.items():
        if host.is_aside or (situation.is_active and name in situation.members):
            continue
        count = len(situation.recent(host.failures_s, now_s))
        others = situation.seating(other for other in situation.usable if other != name)
        if count >= situation.options.host_failures and len(others) >= situation.floor:
            reason = f"it has failed {count} times within {situation.options.window_s:g} s"
            return Move(situation.with_host(name, replace(host, is_aside=True)), (SetAside(name, reason),))
    return None


def _interrupted(situation: Situation, now_s: float) -> Move | None:
    """What ends a round before its time, or at its end, while its ranks run."""
    progress, ending = situation.progress, situation.ending
    if ending is not None:
        if ending.is_urgent:
            return _end(situation, now_s, ending.exit_code, ending.reason)
        if situation.state is State.RUNNING and ending.at_snapshot and not progress.failures:
            return _drain(situation, now_s, ending.reason)
        return _stop(situation, now_s, ending.reason)
    if progress.done >= set(situation.members):
        return _end(situation, now_s, 0, "training is over")
    return _stop(situation, now_s, _cause(progress.failures).text) if progress.failures else None


def _settled(situation: Situation, now_s: float) -> Move:
    """All ranks of a round have ended: the run ends, or waits for the next round."""
    progress, options, ending = situation.progress, situation.options, situation.ending
    if progress.done >= set(situation.members):
        return _end(situation, now_s, 0, "training is over")
    cause = blame(progress.failures)
    if ending is not None:
        return _end(situation, now_s, ending.exit_code, ending.reason, blamed=cause)
    reason = situation.reason if cause is None else cause.text
    if options.mode == "off" and (cause is not None or progress.left & set(situation.members)):
        code = cause.exit_code if cause is not None else PREEMPTED_EXIT_CODE
        return _end(situation, now_s, code, f"{reason}; with elastic.mode=off the run ends", blamed=cause)
    situation = _count_fruitless(situation, cause, now_s)
    if situation.fruitless >= _FRUITLESS_ROUNDS and cause is not None:
        again = f"so did {situation.fruitless} rounds in a row, at once"
        return _end(situation, now_s, cause.exit_code, f"{reason}; {again}", blamed=cause)
    restarts = situation.recent(situation.restarts_s, now_s)
    is_failure = cause is not None and cause.cause is not Cause.PREEMPTED
    if cause is not None and is_failure:
        if len(restarts) >= options.max_restarts:
            spent = f"{options.max_restarts} restarts within {options.window_s:g} s are spent (elastic.max_restarts)"
            return _end(situation, now_s, cause.exit_code, f"{reason}; {spent}", blamed=cause)
        restarts = (*restarts, now_s)
        if cause.is_hosts_fault:
            host = situation.hosts[cause.host]
            situation = situation.with_host(cause.host, replace(host, failures_s=(*host.failures_s, now_s)))
    if progress.left and not situation.usable:
        return _end(situation, now_s, PREEMPTED_EXIT_CODE, f"{reason}; no other host is there", blamed=cause)
    return _to(
        replace(situation, restarts_s=restarts, blame=cause, reason=reason, has_said_misfit=False), State.WAITING, now_s
    )


def _count_fruitless(situation: Situation, cause: Blame | None, now_s: float) -> Situation:
    """Errors of the script right after its start, one like the other, will not pass."""
    is_at_once = not situation.progress.stepped and now_s - situation.progress.started_s < _AT_ONCE_S
    if cause is None or cause.cause is not Cause.EXIT or not is_at_once:
        return replace(situation, fruitless=0)
    is_same = situation.fruitless > 0 and cause.detail == situation.fruitless_error
    return replace(situation, fruitless=situation.fruitless + 1 if is_same else 1, fruitless_error=cause.detail)


def _start_if_alone(situation: Situation, now_s: float, reason: str) -> Move | None:
    """The next round, unless other hosts may be training."""
    ruling = quorum.rule(situation.side, has_fence=situation.terms.has_fence)
    may_claim = now_s - situation.since_s >= situation.terms.waits.fence_s
    if ruling is quorum.Ruling.MUST_WAIT or (ruling is quorum.Ruling.BY_FENCE_LATER and not may_claim):
        return None
    hosts = situation.seating(situation.candidates)
    order = StartRound(situation.number + 1, hosts, reason, action=_kind(situation, hosts), blame=situation.blame)
    busy = {name: replace(situation.hosts[name], presence=Presence.BUSY) for name in hosts}
    started = replace(
        situation, hosts={**situation.hosts, **busy}, number=order.number, members=hosts,
        leader=situation.terms.host, progress=Progress(now_s), reason="", blame=None,
    )  # fmt: skip
    return _to(started, State.STARTING, now_s, order)


def _kind(situation: Situation, hosts: Sequence[str]) -> str:
    if not situation.members:
        return "started"
    if len(hosts) != len(situation.members):
        return "degraded" if len(hosts) < len(situation.members) else "regrown"
    blamed = situation.blame
    is_waited = blamed is not None and blamed.cause in (Cause.HOST_LOST, Cause.UNHEALTHY, Cause.PREEMPTED)
    return "waited" if is_waited or set(hosts) != set(situation.members) else "restarted"


def _may_grow(situation: Situation) -> bool:
    options = situation.options
    if options.mode != "degrade" or not options.regrow or not situation.spares:
        return False
    grown = situation.seating([*situation.members, *situation.spares])
    return sum(situation.ranks_of(grown).values()) > sum(situation.ranks_of(situation.members).values())


def _drain(situation: Situation, now_s: float, reason: str) -> Move:
    order = StopRound(situation.number, reason, at_snapshot=True)
    return _to(replace(situation, reason=reason), State.DRAINING, now_s, order)


def _stop(situation: Situation, now_s: float, reason: str) -> Move:
    return _to(replace(situation, reason=reason), State.STOPPING, now_s, StopRound(situation.number, reason))


def _end(situation: Situation, now_s: float, code: int, reason: str, *, blamed: Blame | None = None) -> Move:
    return _to(situation, State.ENDED, now_s, EndRun(code, reason, blame=blamed))


def _to(situation: Situation, state: State, now_s: float, *actions: Action) -> Move:
    return Move(replace(situation, state=state, since_s=now_s), actions)


def _cause(failures: Sequence[Failure]) -> Blame:
    cause = blame(failures)
    assert cause is not None, "asked only after a failure"
    return cause


def _shortage(situation: Situation, limit_s: float) -> str:
    ready = situation.candidates
    if len(ready) >= situation.floor:
        return situation.sizes.explain(situation.ranks_of(ready), situation.terms.max_hosts)
    short = f"{len(ready)} hosts are ready{f' ({_names(ready)})' if ready else ''} after {limit_s:g} s"
    if situation.options.mode == "degrade":
        return f"{short}, and at least {situation.floor} are needed (MIN of --hosts MIN:MAX)"
    return f"{short} of the {situation.floor} that train; with elastic.mode=degrade the run goes on with fewer"


def _names(hosts: Sequence[str] | frozenset[str]) -> str:
    return ", ".join(sorted(hosts))
