"""What ``hierdist ab`` found of each scheme: the gap with its intervals, and steps to a loss; read from its folders."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compression.figures import SMOOTHED, steps_to
from lightning_dist.experiment.curves import read_curve

AT_SHARE = 0.5
"""Of the budget: the loss to be reached is that which the exact runs have by then."""


def read(folders: Sequence[Path]) -> dict[str, Any]:
    """One row a folder, which is named after its scheme; the loss to be reached is set by the exact runs alone."""
    every = {folder.name: _runs(folder) for folder in folders}
    exact = next(iter(every.values()))["a"]
    level = round(statistics.fmean(_smooth_at(losses) for losses in exact.values()), 3)
    rows = {}
    for folder in folders:
        result = json.loads((folder / "result.json").read_text())
        judged = next(row for row in result["quantities"] if row["name"] == "loss at equal steps")
        runs = every[folder.name]
        rows[folder.name] = {
            "overrides": result["experiment"]["b"],
            "verdict": result["verdict"],
            "seeds": result["seeds"],
            "loss": {arm: judged[arm] for arm in ("a", "b")},
            "gap": judged["change"],
            "steps_to_loss": [_finite(steps_to(losses, level)) for losses in runs["b"].values()],
            "curve": _curve(runs["b"]),
            "notes": result["notes"],
        }
    first = json.loads((folders[0] / "result.json").read_text())
    return {
        "experiment": {key: first["experiment"][key] for key in ("a", "command", "steps")},
        "loss_to_reach": level,
        "smoothed_steps": SMOOTHED,
        "exact_steps_to_loss": [_finite(steps_to(losses, level)) for losses in exact.values()],
        "spread_of_exact_losses": statistics.stdev(statistics.fmean(losses[-SMOOTHED:]) for losses in exact.values()),
        "exact_curve": _curve(exact),
        "arms": rows,
    }


def _runs(folder: Path) -> dict[str, dict[int, Sequence[float]]]:
    """Arm -> seed -> losses, a value a step."""
    seeds = json.loads((folder / "result.json").read_text())["seeds"]
    return {
        arm: {seed: read_curve(folder / f"{arm}-seed{seed}" / "curve").losses.values for seed in seeds}
        for arm in ("a", "b")
    }


def _curve(runs: dict[int, Sequence[float]]) -> list[float]:
    """The mean loss of all seeds in each tenth of the budget."""
    means = [statistics.fmean(each) for each in zip(*runs.values(), strict=True)]
    part = math.ceil(len(means) / 10)
    return [round(statistics.fmean(means[start : start + part]), 4) for start in range(0, len(means), part)]


def _smooth_at(losses: Sequence[float]) -> float:
    end = round(len(losses) * AT_SHARE)
    return statistics.fmean(losses[end - SMOOTHED : end])


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value
