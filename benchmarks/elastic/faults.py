"""Random faults over many short runs: each run ends by itself, with the samples and the loss of one without faults.

Every run appends a line of JSON to a file beside the results, and the next one takes the next seed: the faults may be
collected over several sittings. The run without faults is run once, and kept beside them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.elastic.arms import ARMS, Shape
from benchmarks.elastic.outcomes import FINE, Outcome, add_outcome, not_fine, read_outcomes, shared_reference, summary
from benchmarks.elastic.scene import NeverHappened, Scene, Training
from benchmarks.elastic.steps import Ledger, ledger, read_lines
from benchmarks.record import commit, today
from lightning_dist.elastic.chaos.folder import ChaosFolder
from lightning_dist.elastic.chaos.kinds import KINDS
from lightning_dist.elastic.chaos.plan import Fault, Plan, make_fault
from lightning_dist.elastic.chaos.random_plans import random_plan

SHAPE = Shape(2, 2)
STEPS = 90
FAULTS_A_RUN = 9
NUM_SAMPLES = 1024  # an epoch ends after 64 steps
CLOSE = 1e-3
"""Sums over another number of ranks are taken in another order: the last loss may differ by so much then."""
_FIRST, _LAST = 5, STEPS - 15  # steps that are hit; a host that comes back has time to
_RUN_S = 300.0
# A host that comes back has time to: steps of the smaller run take longer.
_WORDS = ("--model", "tiny", "--batch-size", "4", "--pass-s", "0.1", "0.4", "--samples", str(NUM_SAMPLES))
_SAVES = ("--storage-every", "15", "--storage-keeps-all")  # one may be torn while nothing is in memory
_ARM = replace(ARMS["hierdist"], training=(*ARMS["hierdist"].training, *_SAVES))

_TAKING = ("agent", "host", "store", "cut")
_OTHERS = tuple(kind for kind in KINDS if kind not in (*_TAKING, "signal"))
_WHEN_WHOLE = (2, 3)
"""Ranks that are there only while both hosts are, so that no host is taken while the other one is away."""


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
    """The plan of a run: of ranks alone and with two hosts taken, in turn; a signal at the end of every eighth."""
    keeps_size, ends = seed % 2 == 0, seed % 8 == 7
    faults = _drawn(seed, FAULTS_A_RUN if keeps_size else FAULTS_A_RUN - 2, range(_FIRST, _LAST), _OTHERS)
    if not keeps_size:
        middle = (_FIRST + _LAST) // 2
        for steps in (range(_FIRST, middle - 10), range(middle, _LAST)):
            (fault,) = _drawn(seed + steps.start * 1000, 1, steps, _TAKING)
            options = dict(fault.options)
            if "host" in options:
                options["host"] = "ab"[fault.rank % 2]
            rank = _WHEN_WHOLE[fault.rank // 2]
            faults.append(make_fault(fault.kind, rank=rank, step=fault.step, **options))
    if ends:
        faults.append(make_fault("signal", rank=0, step=STEPS - 5))
    return Drawn(Plan(tuple(sorted(faults, key=lambda fault: fault.step))), keeps_size, ends)


def _drawn(seed: int, num_faults: int, steps: range, kinds: Sequence[str]) -> list[Fault]:
    plan = random_plan(
        seed,
        num_faults=num_faults,
        num_ranks=SHAPE.num_hosts * SHAPE.ranks_per_host,
        num_steps=len(steps) + 1,
        kinds=kinds,
        interface="eth0",
    )
    first = steps.start - 1
    return [make_fault(each.kind, rank=each.rank, step=first + each.step, **each.options) for each in plan.faults]


def run_faults(
    *, runs: int, seed: int | None, again: bool, lines: Path, folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """More runs, held against a run without faults; what all so far have given.

    Args:
        runs: How many more.
        seed: Of the first; ``None``: the one after those that are there.
        again: Before that, those that were not fine the last time.
        lines: File with a line of each run; made, or added to.
        folder: For runs, each in one of its own.
        say: Told of each run.
    """
    known = read_outcomes(lines)
    first = max((outcome["seed"] for outcome in known), default=-1) + 1 if seed is None else seed
    seeds = [*(not_fine(known) if again else ()), *range(first, first + runs)]
    if seeds:
        settings = {"steps": STEPS, "shape": SHAPE.name, "words": [*_WORDS], "torch": torch.__version__}
        reference = shared_reference(
            lines.with_suffix(".reference.json"), settings, lambda: _uninterrupted(folder / "reference")
        )
        for number in seeds:
            outcome = _one(number, folder / str(number), reference)
            add_outcome(lines, outcome)
            say(_in_words(outcome))
    return summary(read_outcomes(lines))


def _in_words(outcome: Outcome) -> str:
    injected, refused = outcome["injected"], outcome["refused"]
    more = f"; refused: {'; '.join(refused)}" if refused else ""
    return f"faults {outcome['seed']}: {outcome['verdict']} in {outcome['seconds']:.0f} s ({', '.join(injected)}{more})"


def _training() -> Training:
    return Training(STEPS, _WORDS)


def _uninterrupted(folder: Path) -> Ledger:
    with Scene(_ARM, SHAPE, folder, _training()) as scene:
        codes = scene.wait(deadline_s=_RUN_S)
        assert set(codes.values()) == {0}, f"the run without faults ended with {codes}\n{scene.last_words()}"
        found = ledger(read_lines(folder), num_samples=NUM_SAMPLES)
    assert len(found.steps) == STEPS, f"the run without faults did {len(found.steps)} of {STEPS} steps"
    return found


def _one(seed: int, folder: Path, reference: Ledger) -> Outcome:
    drawn = draw(seed)
    plan, chaos = folder.with_suffix(".json"), ChaosFolder(folder.with_suffix(".chaos"))
    plan.parent.mkdir(parents=True, exist_ok=True)
    plan.write_text(drawn.plan.to_json(), encoding="utf-8")

    def before(host: str) -> list[str]:
        program = str(Path(sys.executable).with_name("hierdist"))
        return [program, "chaos", "--plan", str(plan), "--record", str(chaos.path), "--host", host, "--"]

    begin_s = time.monotonic()
    hung, codes = "", dict[str, int]()
    with Scene(_ARM, SHAPE, folder, _training(), before=before) as scene:
        try:
            codes = scene.wait(deadline_s=_RUN_S)
        except NeverHappened as reason:
            hung = str(reason)
        words = hung or scene.last_words()
        folder.with_suffix(".txt").write_text(scene.words(), encoding="utf-8")
    found = ledger(read_lines(folder), num_samples=NUM_SAMPLES)
    verdict = "hung" if hung else judged(found, reference, drawn, codes=list(codes.values()))
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


def judged(found: Ledger, reference: Ledger, drawn: Drawn, *, codes: Sequence[int]) -> str:
    """How a run that has ended compares with one without faults.

    The global batch is kept at every size, so each step is to have the samples that it has there.

    Args:
        found: What it was trained on.
        reference: The run without faults.
        drawn: Its faults.
        codes: Exit codes of its hosts.
    """
    if found.repeated or any(reference.steps.get(step) != samples for step, samples in found.steps.items()):
        return "other samples"
    if len(found.steps) < STEPS and not drawn.ends:
        return "ended early"
    if any(codes):
        return "other exit code"
    if found.worlds == reference.worlds:
        agrees = all(found.losses[step] == reference.losses[step] for step in found.losses)
    else:
        last = max(found.losses)
        agrees = abs(found.losses[last] - reference.losses[last]) <= CLOSE
    if not agrees:
        return "other loss"
    if len(found.steps) < STEPS:
        return "ended when told to"
    return "same" if found.worlds == reference.worlds else "same samples"
