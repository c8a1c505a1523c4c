"""Random faults over many short runs: each run ends by itself, with the samples and the loss of one without faults."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.elastic.arms import ARMS, Shape
from benchmarks.elastic.scene import NeverHappened, Scene, Training
from benchmarks.elastic.steps import Ledger, ledger, read_lines, same_samples
from lightning_dist.elastic.chaos.folder import ChaosFolder
from lightning_dist.elastic.chaos.random_plans import random_plan

SHAPE = Shape(2, 2)
STEPS = 60
FAULTS_A_RUN = 4
NUM_SAMPLES = 1 << 16
_RUN_S = 300.0
_TRAINING = Training(STEPS, ("--samples", str(NUM_SAMPLES)))
_ENDS_A_RUN = frozenset({"signal"})  # it asks a rank to end, and the run with it, in order


def run_faults(*, runs: int, first_seed: int, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs with the seeds from the first on, held against a run without faults.

    Args:
        runs: How many.
        first_seed: Of the first plan.
        folder: For runs, each in one of its own.
        say: Told of each run.
    """
    reference = _reference(folder / "reference")
    kinds: Counter[str] = Counter()
    outcomes: list[dict[str, Any]] = []
    for seed in range(first_seed, first_seed + runs):
        outcome = _one(seed, folder / str(seed), reference)
        kinds.update(outcome["injected"])
        outcomes.append(outcome)
        say(f"faults {seed}: {outcome['verdict']} ({', '.join(outcome['injected']) or 'none came'})")
    return {
        "runs": runs,
        "faults": sum(kinds.values()),
        "kinds": dict(sorted(kinds.items())),
        "verdicts": dict(Counter(outcome["verdict"] for outcome in outcomes)),
        "largest_loss_difference": max((outcome.get("loss_difference", 0.0) for outcome in outcomes), default=0.0),
        "each": outcomes,
    }


def _reference(folder: Path) -> Ledger:
    with Scene(ARMS["hierdist"], SHAPE, folder, _TRAINING) as scene:
        codes = scene.wait(deadline_s=_RUN_S)
        assert set(codes.values()) == {0}, f"the run without faults ended with {codes}\n{scene.last_words()}"
        return ledger(read_lines(folder), num_samples=NUM_SAMPLES)


def _one(seed: int, folder: Path, reference: Ledger) -> dict[str, Any]:
    num_ranks = SHAPE.num_hosts * SHAPE.ranks_per_host
    plan = random_plan(seed, num_faults=FAULTS_A_RUN, num_ranks=num_ranks, num_steps=STEPS, interface="eth0")
    path = folder.with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(plan.to_json(), encoding="utf-8")
    chaos = folder.with_suffix(".chaos")

    def before(host: str) -> list[str]:
        program = str(Path(sys.executable).with_name("hierdist"))
        return [program, "chaos", "--plan", str(path), "--record", str(chaos), "--host", host, "--"]

    outcome: dict[str, Any] = {"seed": seed, "injected": [], "verdict": "hung"}
    with Scene(ARMS["hierdist"], SHAPE, folder, _TRAINING, before=before) as scene:
        try:
            codes = scene.wait(deadline_s=_RUN_S)
        except NeverHappened as reason:
            return {**outcome, "injected": _injected(chaos), "detail": str(reason)[-4000:]}
        words = scene.last_words()
    outcome["injected"] = _injected(chaos)
    found = ledger(read_lines(folder), num_samples=NUM_SAMPLES)
    verdict = _verdict(found, reference, has_ended=bool(_ENDS_A_RUN & set(outcome["injected"])))
    outcome |= {"verdict": verdict, "codes": codes, "worlds": sorted(found.worlds), "steps": len(found.steps)}
    if len(found.steps) == STEPS:
        outcome["loss_difference"] = abs(found.losses[STEPS] - reference.losses[STEPS])
    if verdict not in ("same", "same but for its size", "ended when told to"):
        outcome["detail"] = words[-4000:]
    return outcome


def _verdict(found: Ledger, reference: Ledger, *, has_ended: bool) -> str:
    if found.repeated or not same_samples(found, reference):
        return "other samples"
    if len(found.steps) < STEPS:
        return "ended when told to" if has_ended else "ended early"
    if found.worlds != reference.worlds:
        return "same but for its size"
    return "same" if found.losses[STEPS] == reference.losses[STEPS] else "other loss"


def _injected(folder: Path) -> list[str]:
    path = ChaosFolder(folder).path / "chaos.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line["kind"] for line in lines if line["what"] == "injected"]
