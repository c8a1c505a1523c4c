"""From a fault to the next step: a rank killed, a host killed or fallen silent, and the host of the store likewise."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.elastic.arms import Arm, Shape
from benchmarks.elastic.scene import NeverHappened, Scene, Training
from benchmarks.elastic.steps import Recovery, recovery
from lightning_dist import incidents
from lightning_dist.incidents import Incident

FAULTS = ("rank_killed", "host_killed", "host_silent", "store_host_killed", "store_host_silent")
HEALTHY_STEPS = 12  # between a recovery and the next fault: two snapshots at least
_ENDLESS = 1_000_000
_START_S = 90.0


def run_trials(
    arm: Arm,
    shape: Shape,
    fault: str,
    *,
    parallel: str,
    trials: int,
    limit_s: float,
    folder: Path,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """One fault after another, in one run as long as it lives; what each took.

    Args:
        arm: Who launches.
        shape: How many hosts and ranks.
        fault: Of :data:`FAULTS`.
        parallel: Of the model.
        trials: How many.
        limit_s: After that, recovery is taken for never.
        folder: For runs, each in one of its own.
        say: Told of each trial.
    """
    done: list[Recovery | None] = []
    reasons: list[str] = []
    found: list[Incident] = []
    training = Training(_ENDLESS, ("--parallel", parallel))
    while len(done) < trials:
        with Scene(arm, shape, folder / f"{fault}-{len(done)}", training) as scene:
            try:
                newest = scene.steps_after(0, HEALTHY_STEPS, world=_full(shape), deadline_s=_START_S)
            except NeverHappened as reason:
                return {**_summary(done), "reasons": [*reasons, f"it never trained: {reason}"]}
            while len(done) < trials:
                try:
                    newest = _trial(scene, fault, len(done), newest, limit_s, done, say)
                except NeverHappened as reason:
                    reasons.append(str(reason))
                    break
            found += incidents.read(scene.folder / "record")
    return {**_summary(done), "phases": _phases(found), "reasons": reasons}


def _trial(
    scene: Scene,
    fault: str,
    number: int,
    round_before: int,
    limit_s: float,
    done: list[Recovery | None],
    say: Callable[[str], None],
) -> int:
    """One fault, and the way back to health; the round after it."""
    fault_s, victim = _hurt(scene, fault, number)
    try:
        scene.recovered(fault_s=fault_s, round_before=round_before, deadline_s=limit_s)
    except NeverHappened:
        done.append(None)
        say(f"{scene.arm.name} {scene.shape.name} {fault} {number + 1}: never within {limit_s:g} s")
        raise
    found = recovery(scene.lines(), fault_s=fault_s, round_before=round_before)
    assert found is not None, "it was waited for"
    done.append(found)
    say(
        f"{scene.arm.name} {scene.shape.name} {fault} {number + 1}: {found.seconds:.1f} s, {found.steps_lost} steps "
        f"lost, {found.ranks} ranks"
    )
    if victim is not None:
        scene.bring_back(victim)
    steps = HEALTHY_STEPS + number % 5  # so that faults come at all distances from a snapshot
    return scene.steps_after(round_before, steps, world=_full(scene.shape), deadline_s=max(limit_s, _START_S))


def _hurt(scene: Scene, fault: str, number: int) -> tuple[float, str | None]:
    """When it was done, and to which host."""
    if fault == "rank_killed":
        return scene.kill_rank(number), None
    hosts = list(scene.cluster.hosts)
    # Whoever leads goes on leading until it is lost; then the other of the two endpoints does.
    victim = hosts[number % 2] if fault.startswith("store") and scene.arm.is_ours else hosts[0]
    if not fault.startswith("store"):
        victim = hosts[-1]
    return (scene.kill_host(victim) if fault.endswith("killed") else scene.lose_host(victim)), victim


def _phases(found: Sequence[Incident]) -> dict[str, float]:
    """Median seconds of each phase, of incidents that were failures."""
    failures = [incident for incident in found if incident.action != "regrown"]
    each = {
        phase: [incident.seconds[phase] for incident in failures if phase in incident.seconds]
        for phase in incidents.PHASES
    }
    return {phase: statistics.median(seconds) for phase, seconds in each.items() if seconds}


def _full(shape: Shape) -> int:
    return shape.num_hosts * shape.ranks_per_host


def _summary(done: list[Recovery | None]) -> dict[str, Any]:
    seconds = sorted(each.seconds for each in done if each is not None)
    summary: dict[str, Any] = {
        "trials": len(done),
        "never": sum(each is None for each in done),
        "each": [None if each is None else asdict(each) for each in done],
    }
    if seconds:
        summary["p50_s"] = statistics.median(seconds)
        summary["p99_s"] = seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]
        summary["most_steps_lost"] = max(each.steps_lost for each in done if each is not None)
    return summary
