"""What each event changes in what the leader knows; what is done about it is said in ``rules``. Pure.

Events come late, twice, or out of order, above all when another leader has taken over. So each only adds to what is
known, in any state; what belongs to an earlier round is old news.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lightning_dist.elastic.policy import events
from lightning_dist.elastic.policy.blame import Failure
from lightning_dist.elastic.policy.events import Cause, Event
from lightning_dist.elastic.policy.situation import LOST, Ending, Host, Presence, Situation, State


def note(situation: Situation, event: Event, now_s: float) -> Situation:
    """What the leader knows after an event."""
    noted = _NOTES[type(event)](situation, event, now_s)
    has_enough = len(noted.seating(noted.candidates)) >= noted.floor
    return replace(noted, enough_s=(now_s if noted.enough_s is None else noted.enough_s) if has_enough else None)


def _host_ready(situation: Situation, event: events.HostReady, now_s: float) -> Situation:
    host = _known(situation, event.host)
    if host.is_leaving:  # it is on its way out, and takes no part until its agent has begun anew
        return situation
    if situation.state is not State.STOPPING and event.host in situation.outstanding:
        detail = "its agent is there again, without the ranks of this round"
        situation = _failed(situation, Failure(Cause.HOST_LOST, event.host, detail=detail))
    return situation.with_host(event.host, replace(host, presence=Presence.READY, num_ranks=event.num_ranks))


def _host_lost(situation: Situation, event: events.HostLost, now_s: float) -> Situation:
    host = _known(situation, event.host)
    if situation.is_active and event.host in situation.outstanding:
        cause = Cause.PREEMPTED if event.host in situation.progress.left else Cause.HOST_LOST
        situation = _failed(situation, Failure(cause, event.host, detail=event.detail))
    is_dead = event.is_certain or host.presence is Presence.GONE
    presence = Presence.GONE if is_dead else Presence.SILENT
    return situation.with_host(event.host, replace(host, presence=presence, is_leaving=False))


def _host_leaves(situation: Situation, event: events.HostLeaves, now_s: float) -> Situation:
    situation = _heard(situation, event.host)
    host = _known(situation, event.host)
    if host.presence in LOST:
        return situation
    situation = situation.with_host(event.host, replace(host, is_leaving=True))
    return _progressed(situation, left=situation.progress.left | {event.host})


def _host_unhealthy(situation: Situation, event: events.HostUnhealthy, now_s: float) -> Situation:
    host = replace(_known(situation, event.host), presence=Presence.UNHEALTHY)
    if situation.is_active and event.host in situation.outstanding:
        situation = _failed(situation, Failure(Cause.UNHEALTHY, event.host, detail=event.detail))
    else:  # a member is counted when its round is over
        host = replace(host, failures_s=(*host.failures_s, now_s))
    return situation.with_host(event.host, host)


def _worker_failed(situation: Situation, event: events.WorkerFailed, now_s: float) -> Situation:
    if not _is_news(situation, event.round, event.host):
        return situation
    failure = Failure(
        event.cause, event.host, event.rank, event.detail, event.exit_code, is_consequence=event.is_consequence
    )
    return _failed(_heard(situation, event.host), failure)


def _round_stopped(situation: Situation, event: events.RoundStopped, now_s: float) -> Situation:
    if event.round != situation.number:
        return situation
    if _known(situation, event.host).presence is Presence.SILENT:  # it was only slow
        situation = _present(situation, event.host)
    if not _is_news(situation, event.round, event.host):
        return situation
    situation = _heard(situation, event.host)
    was_asked = situation.state in (State.DRAINING, State.STOPPING)
    if not was_asked and event.host in situation.outstanding:
        is_leaving = event.host in situation.progress.left
        cause = Cause.PREEMPTED if is_leaving else Cause.EXIT
        situation = _failed(
            situation, Failure(cause, event.host, detail="its ranks have ended", is_consequence=not is_leaving)
        )
    return _progressed(situation, stopped=situation.progress.stopped | {event.host})


def _first_step(situation: Situation, event: events.FirstStep, now_s: float) -> Situation:
    if not _is_news(situation, event.round, event.host):
        return situation
    situation = _heard(situation, event.host)
    return _progressed(situation, stepped=situation.progress.stepped | {event.host})


def _snapshot(situation: Situation, event: events.Snapshot, now_s: float) -> Situation:
    if event.round != situation.number:
        return situation
    newest = max(event.step, situation.progress.snapshot_step or 0)
    # All ranks commit a snapshot together, after a step at least.
    return _progressed(situation, snapshot_step=newest, stepped=situation.progress.stepped | set(situation.members))


def _round_done(situation: Situation, event: events.RoundDone, now_s: float) -> Situation:
    if not _is_news(situation, event.round, event.host):
        return situation
    situation = _heard(situation, event.host)
    return _progressed(situation, done=situation.progress.done | {event.host})


def _options_told(situation: Situation, event: events.OptionsTold, now_s: float) -> Situation:
    return replace(situation, options=event.options)


def _sizes_told(situation: Situation, event: events.SizesTold, now_s: float) -> Situation:
    return replace(situation, sizes=event.sizes)


def _end_asked(situation: Situation, event: events.EndAsked, now_s: float) -> Situation:
    reason = event.detail or "the run was told to end"
    is_urgent = situation.ending is not None
    return replace(situation, ending=Ending(event.exit_code, reason, event.at_snapshot, is_urgent))


def _unchanged(situation: Situation, event: Event, now_s: float) -> Situation:
    return situation


_NOTES: Mapping[type, Callable[[Situation, Any, float], Situation]] = {
    events.HostReady: _host_ready,
    events.HostLost: _host_lost,
    events.HostLeaves: _host_leaves,
    events.HostUnhealthy: _host_unhealthy,
    events.WorkerFailed: _worker_failed,
    events.RoundStopped: _round_stopped,
    events.FirstStep: _first_step,
    events.Snapshot: _snapshot,
    events.RoundDone: _round_done,
    events.OptionsTold: _options_told,
    events.SizesTold: _sizes_told,
    events.EndAsked: _end_asked,
    events.Progress: _unchanged,
    events.Tick: _unchanged,
}


def _known(situation: Situation, name: str) -> Host:
    return situation.hosts.get(name) or Host(Presence.BUSY, arrival=len(situation.hosts))


def _present(situation: Situation, name: str) -> Situation:
    return situation.with_host(name, replace(_known(situation, name), presence=Presence.BUSY))


def _heard(situation: Situation, name: str) -> Situation:
    """A host that says something is there, if it was not known to be lost."""
    host = situation.hosts.get(name)
    return _present(situation, name) if host is None or host.presence is Presence.EXPECTED else situation


def _is_news(situation: Situation, number: int, host: str) -> bool:
    return situation.is_active and number == situation.number and host in situation.members


def _failed(situation: Situation, failure: Failure) -> Situation:
    return _progressed(situation, failures=(*situation.progress.failures, failure))


def _progressed(situation: Situation, **changes: Any) -> Situation:
    return replace(situation, progress=replace(situation.progress, **changes))
