"""What a leader tells people of rounds: that one begins, that one ends and why, that training goes on. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_dist.elastic.policy.actions import StartRound, StopRound
from lightning_dist.elastic.rounds import Round
from lightning_dist.incidents import Incident

_AS: Mapping[str, str] = {
    "restarted": ", all started again",
    "waited": ", all hosts there again",
    "degraded": ", smaller",
    "regrown": ", larger",
}


def beginning(action: StartRound, value: Round) -> str:
    """``round 2 begins, smaller: 2 ranks on host b``."""
    hosts = [seat.host for seat in value.seats]
    place = f"host{'s' if len(hosts) > 1 else ''} {', '.join(hosts)}"
    return f"round {value.number} begins{_AS.get(action.action, '')}: {_counted(value.world_size, 'rank')} on {place}"


def stopping(action: StopRound) -> str:
    """``round 1 ends: rank 3 on host b was killed: killed by SIGKILL``."""
    return f"round {action.number} {'saves and ' if action.at_snapshot else ''}ends: {action.reason}"


def going_on(incident: Incident) -> str | None:
    """``trains again 3.7 s later, after step 435; 12 steps are done again``; ``None``: not yet."""
    if incident.step_after is None:
        return None
    again = ""
    if incident.steps_lost is not None:
        again = f"; {_counted(incident.steps_lost, 'step')} done again" if incident.steps_lost else "; no step is lost"
    return f"trains again {incident.total_s:.1f} s later, after step {incident.step_after}{again}"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
