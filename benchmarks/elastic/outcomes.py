"""What runs with random faults have left: a line a run in a file, and the run without faults that all are held against.

The file may grow over several sittings and commits. A seed may be there more than once: what counts in the end is its
newest line, and the older ones tell what was wrong, at which commit.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.elastic.steps import Ledger
from benchmarks.record import commit

FINE = ("same", "same samples", "ended when told to")
Outcome = dict[str, Any]


def read_outcomes(lines: Path) -> list[Outcome]:
    """Of all runs so far."""
    if not lines.exists():
        return []
    return [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]


def add_outcome(lines: Path, outcome: Outcome) -> None:
    """One more line, in one call, so that several may be at it."""
    lines.parent.mkdir(parents=True, exist_ok=True)
    with lines.open("a", encoding="utf-8") as file:
        file.write(json.dumps(outcome) + "\n")


def newest(outcomes: Sequence[Outcome]) -> dict[int, Outcome]:
    """Seed -> its newest line."""
    return {outcome["seed"]: outcome for outcome in outcomes}


def not_fine(outcomes: Sequence[Outcome]) -> list[int]:
    """Seeds whose newest line says that something was wrong."""
    return sorted(seed for seed, outcome in newest(outcomes).items() if outcome["verdict"] not in FINE)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What all runs have given together."""
    kinds = Counter(kind for outcome in outcomes for kind in outcome["injected"])
    return {
        "runs": len(outcomes),
        "faults": sum(kinds.values()),
        "refused": sum(len(outcome["refused"]) for outcome in outcomes),
        "kinds": dict(sorted(kinds.items())),
        "verdicts": dict(Counter(outcome["verdict"] for outcome in outcomes)),
        "failed": [f"{each['seed']} at {each['commit']}" for each in outcomes if each["verdict"] not in FINE],
        "not_fine": not_fine(outcomes),
        "largest_loss_difference": max(
            (each["loss_difference"] or 0.0 for each in outcomes if each["verdict"] in FINE), default=0.0
        ),
        "commits": list(dict.fromkeys(outcome["commit"] for outcome in outcomes)),
    }


def shared_reference(path: Path, settings: Mapping[str, Any], run: Callable[[], Ledger]) -> Ledger:
    """The run without faults, from a file if it was made with the same settings; else it is run and kept.

    Args:
        path: Of the file, JSON.
        settings: Whatever its numbers follow from.
        run: Makes it.
    """
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["settings"] == dict(settings):
            return Ledger(
                steps={int(step): tuple(samples) for step, samples in kept["steps"].items()},
                losses={int(step): loss for step, loss in kept["losses"].items()},
                worlds=frozenset(kept["worlds"]),
                repeated=kept["repeated"],
            )
    made = run()
    kept = {
        "settings": dict(settings), "commit": commit(), "worlds": sorted(made.worlds), "repeated": made.repeated,
        "steps": made.steps, "losses": made.losses,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept) + "\n", encoding="utf-8")
    return made
