"""What the benchmark of random faults makes of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.elastic.faults import FAULTS_A_RUN, STEPS, draw, judged, run_faults
from benchmarks.elastic.outcomes import read_outcomes, shared_reference, summary
from benchmarks.elastic.steps import Ledger, Line, ledger

REFERENCE = Ledger(
    steps={step: (2 * step, 2 * step + 1) for step in range(1, STEPS + 1)},
    losses={step: 1 / step for step in range(1, STEPS + 1)},
    worlds=frozenset({4}),
    repeated=0,
)


def up_to(step: int) -> Ledger:
    return replace(
        REFERENCE,
        steps={number: REFERENCE.steps[number] for number in range(1, step + 1)},
        losses={number: REFERENCE.losses[number] for number in range(1, step + 1)},
    )


def smaller(losses: dict[int, float]) -> Ledger:
    """Of another number of ranks for a while."""
    return replace(REFERENCE, worlds=frozenset({2, 4}), losses={**REFERENCE.losses, **losses})


@pytest.mark.parametrize(
    ("found", "seed", "codes", "verdict"),
    [
        (REFERENCE, 0, [0, 0], "same"),
        (REFERENCE, 0, [0, 1], "other exit code"),
        (smaller({}), 1, [0, 0], "same samples"),
        (smaller({STEPS: 1 / STEPS + 1e-6}), 1, [0, 0], "same samples"),
        (smaller({STEPS: 0.5}), 1, [0, 0], "other loss"),
        (replace(REFERENCE, losses={**REFERENCE.losses, STEPS: 1 / STEPS + 1e-6}), 0, [0, 0], "other loss"),
        (replace(REFERENCE, repeated=1), 0, [0, 0], "other samples"),
        (replace(REFERENCE, steps={**REFERENCE.steps, 3: (6, 8)}), 1, [0, 0], "other samples"),
        (up_to(STEPS - 5), 7, [0, 0], "ended when told to"),
        (up_to(STEPS - 5), 1, [0, 0], "ended early"),
    ],
)
def test_a_run_is_judged(found: Ledger, seed: int, codes: list[int], verdict: str) -> None:
    assert judged(found, REFERENCE, draw(seed), codes=codes) == verdict


def test_plans_are_drawn_by_seed_and_hit_every_kind_in_time() -> None:
    assert draw(5) == draw(5)
    kinds = {fault.kind for seed in range(16) for fault in draw(seed).plan.faults}
    assert len(kinds) == 15
    assert not {"host", "agent", "store", "cut"} & {fault.kind for fault in draw(4).plan.faults}
    assert [draw(seed).ends for seed in (6, 7)] == [False, True]
    assert draw(7).plan.faults[-1].kind == "signal"
    assert len(draw(7).plan.faults) == FAULTS_A_RUN + 1


def outcome(seed: int, verdict: str, **others: Any) -> dict[str, Any]:
    made = {"seed": seed, "verdict": verdict, "injected": ["kill"], "refused": [], "loss_difference": 0.0}
    return {**made, "commit": "c0ffee", **others}


def test_runs_of_several_sittings_are_summed_up(tmp_path: Path) -> None:
    lines = tmp_path / "faults.jsonl"
    assert read_outcomes(lines) == []
    outcomes = [
        outcome(0, "same"),
        outcome(1, "hung", injected=["cut", "kill"], loss_difference=None),
        outcome(2, "same samples", loss_difference=0.25, refused=["torn: nothing is committed"]),
        outcome(3, "ended early"),
        outcome(3, "same", commit="decade"),
    ]
    lines.write_text("".join(json.dumps(each) + "\n" for each in outcomes))
    assert run_faults(runs=0, seed=None, again=False, lines=lines, folder=tmp_path, say=print) == summary(outcomes)
    assert summary(outcomes) == {
        "runs": 5,
        "faults": 6,
        "refused": 1,
        "kinds": {"cut": 1, "kill": 5},
        "verdicts": {"same": 2, "hung": 1, "same samples": 1, "ended early": 1},
        "failed": ["1 at c0ffee", "3 at c0ffee"],
        "not_fine": [1],
        "largest_loss_difference": 0.25,
        "commits": ["c0ffee", "decade"],
    }


def test_the_run_without_faults_is_run_once_for_the_same_settings(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "reference.json"
    made: list[Ledger] = []

    def run() -> Ledger:
        made.append(REFERENCE)
        return REFERENCE

    for settings in ({"steps": 9}, {"steps": 9}, {"steps": 8}):
        assert shared_reference(path, settings, run) == REFERENCE
    assert len(made) == 2


def test_of_a_step_that_was_done_again_the_newest_round_counts() -> None:
    lines = [
        Line(at_s=at_s, round=number, rank=rank, world=world, step=step, samples=samples, loss=loss)
        for at_s, (number, rank, world, step, samples, loss) in enumerate(
            [
                (1, 0, 2, 1, (0, 1), 4.0),
                (1, 1, 2, 1, (2, 3), 2.0),
                (1, 0, 2, 2, (4, 5), 9.0),
                (2, 0, 1, 2, (4, 5), 1.0),
                (2, 0, 1, 2, (6, 7), 3.0),
            ]
        )
    ]
    found = ledger(lines, num_samples=100)
    assert found.steps == {1: (0, 1, 2, 3), 2: (4, 5, 6, 7)}
    assert found.losses == {1: 3.0, 2: 2.0}
    assert (found.worlds, found.repeated) == (frozenset({1, 2}), 0)
