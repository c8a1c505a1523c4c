"""Random faults over many short runs: each run ends by itself, with the samples and the loss of one without faults.

Every run appends a line of JSON to a file beside the results, and the next one takes the next seed: the faults may be
collected over several sittings.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.elastic.arms import ARMS, Shape
from benchmarks.elastic.scene import NeverHappened, Scene, Training
from benchmarks.elastic.steps import Ledger, ledger, read_lines
from benchmarks.record import commit, today
from lightning_dist.elastic.chaos.folder import ChaosFolder
from lightning_dist.elastic.chaos.kinds import KINDS
from lightning_dist.elastic.chaos.plan import Plan, make_fault
from lightning_dist.elastic.chaos.random_plans import random_plan

SHAPE = Shape(2, 2)
STEPS = 120
FAULTS_A_RUN = 8
NUM_SAMPLES = 1 << 16
FINE = ("same", "same samples", "ended when told to")
_RUN_S = 400.0
_TRAINING = Training(STEPS, ("--samples", str(NUM_SAMPLES)))

# The first kinds leave the run at its size, so that its loss is to be the same to the last bit. A signal ends a run.
_OF_RANKS = ("kill", "exception", "exit", "oom", "stop", "enospc", "torn", "keeper", "slow_host", "slow_link")
_OF_HOSTS = tuple(kind for kind in KINDS if kind != "signal")


@dataclass(frozen=True)
class Drawn:
    """A plan, and what it is to leave.

    Attributes:
        plan: The faults.
        keeps_size: None of them takes a host.
        ends: The last one asks the run to end.
    """

    plan: Plan
    keeps_size: bool
    ends: bool


def draw(seed: int) -> Drawn:
    """The plan of a run: of ranks and of hosts in turn, and a signal at the end of every eighth."""
    keeps_size, ends = seed % 2 == 0, seed % 8 == 7
    plan = random_plan(
        seed,
        num_faults=FAULTS_A_RUN,
        num_ranks=SHAPE.num_hosts * SHAPE.ranks_per_host,
        num_steps=STEPS - 10,
        kinds=_OF_RANKS if keeps_size else _OF_HOSTS,
        interface="eth0",
    )
    if ends:
        plan = Plan((*plan.faults, make_fault("signal", rank=0, step=STEPS - 5)))
    return Drawn(plan, keeps_size, ends)


def run_faults(*, runs: int, lines: Path, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """More runs, held against a run without faults; what all so far have given.

    Args:
        runs: How many more.
        lines: File with a line of each run; made, or added to.
        folder: For runs, each in one of its own.
        say: Told of each run.
    """
    known = read_outcomes(lines)
    seed = max((outcome["seed"] for outcome in known), default=-1) + 1
    reference = _reference(folder / "reference") if runs else None
    for number in range(seed, seed + runs):
        assert reference is not None
        outcome = _one(number, folder / str(number), reference)
        known.append(outcome)
        lines.parent.mkdir(parents=True, exist_ok=True)
        with lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(outcome) + "\n")
        say(f"faults {number}: {outcome['verdict']} in {outcome['seconds']:.0f} s ({', '.join(outcome['injected'])})")
    return summary(known)


def read_outcomes(lines: Path) -> list[dict[str, Any]]:
    """Of all runs so far."""
    if not lines.exists():
        return []
    return [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]


def summary(outcomes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all runs have given together."""
    kinds = Counter(kind for outcome in outcomes for kind in outcome["injected"])
    return {
        "runs": len(outcomes),
        "faults": sum(kinds.values()),
        "refused": sum(len(outcome["refused"]) for outcome in outcomes),
        "kinds": dict(sorted(kinds.items())),
        "verdicts": dict(Counter(outcome["verdict"] for outcome in outcomes)),
        "not_fine": [outcome["seed"] for outcome in outcomes if outcome["verdict"] not in FINE],
        "largest_loss_difference": max((outcome["loss_difference"] or 0.0 for outcome in outcomes), default=0.0),
    }


def _reference(folder: Path) -> Ledger:
    with Scene(ARMS["hierdist"], SHAPE, folder, _TRAINING) as scene:
        codes = scene.wait(deadline_s=_RUN_S)
        assert set(codes.values()) == {0}, f"the run without faults ended with {codes}\n{scene.last_words()}"
        return ledger(read_lines(folder), num_samples=NUM_SAMPLES)


def _one(seed: int, folder: Path, reference: Ledger) -> dict[str, Any]:
    drawn = draw(seed)
    plan, chaos = folder.with_suffix(".json"), ChaosFolder(folder.with_suffix(".chaos"))
    plan.parent.mkdir(parents=True, exist_ok=True)
    plan.write_text(drawn.plan.to_json(), encoding="utf-8")

    def before(host: str) -> list[str]:
        program = str(Path(sys.executable).with_name("hierdist"))
        return [program, "chaos", "--plan", str(plan), "--record", str(chaos.path), "--host", host, "--"]

    begin_s = time.monotonic()
    hung, codes = "", dict[str, int]()
    with Scene(ARMS["hierdist"], SHAPE, folder, _TRAINING, before=before) as scene:
        try:
            codes = scene.wait(deadline_s=_RUN_S)
        except NeverHappened as reason:
            hung = str(reason)
        words = hung or scene.last_words()
    found = ledger(read_lines(folder), num_samples=NUM_SAMPLES)
    verdict = "hung" if hung else judged(found, reference, drawn)
    last = max(found.losses, default=0)
    record = chaos.record()
    return {
        "seed": seed,
        "date": today(),
        "commit": commit(),
        "verdict": verdict,
        "seconds": round(time.monotonic() - begin_s, 1),
        "injected": [line["kind"] for line in record if line["what"] == "injected"],
        "refused": [f"{line['kind']}: {line['detail']}" for line in record if line["what"] == "refused"],
        "left_behind": [each for line in record if line["what"] == "ended" for each in line["left_behind"]],
        "codes": codes,
        "worlds": sorted(found.worlds),
        "steps": len(found.steps),
        "loss_difference": abs(found.losses[last] - reference.losses[last]) if last in reference.losses else None,
        "detail": "" if verdict in FINE else words[-6000:],
    }


def judged(found: Ledger, reference: Ledger, drawn: Drawn) -> str:
    """How a run that has ended compares with one without faults.

    The global batch is kept at every size, so each step is to have the samples that it has there.
    """
    if found.repeated or any(reference.steps.get(step) != samples for step, samples in found.steps.items()):
        return "other samples"
    if len(found.steps) < STEPS:
        return "ended when told to" if drawn.ends else "ended early"
    if found.worlds != reference.worlds:
        return "same samples"
    return "same" if found.losses == reference.losses else "other loss"
