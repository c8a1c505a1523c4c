"""What it costs when nothing fails, what is taken for a failure that is none, and the time that faults leave."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.elastic.arms import ARMS, Arm, Shape
from benchmarks.elastic.scene import Scene, Training
from benchmarks.elastic.steps import Line, newest_round, read_lines
from lightning_dist import incidents

SHAPE = Shape(2, 2)
_WARM = 10  # steps that are not counted
_BLOCK = 5  # steps between two snapshots: each block has one
_PLAIN = Arm("plain", is_ours=True, words=("--elastic", "off"), training=("--storage-every", "0"))
_GUARDED = replace(ARMS["hierdist"], training=(*ARMS["hierdist"].training[:4], "--storage-every", "0"))


def run_alarms(*, steps: int, folder: Path) -> dict[str, Any]:
    """Healthy steps with saves, validation and a pause of 10 s: how many rounds and incidents there were.

    Args:
        steps: How many.
        folder: Of the run.
    """
    pause = f"{steps // 2}:10"
    training = Training(steps, ("--validate-every", "100", "--pause", pause))
    with Scene(ARMS["hierdist"], SHAPE, folder, training) as scene:
        codes = scene.wait(deadline_s=120 + steps)
    lines = read_lines(folder)
    return {
        "steps": len({line.step for line in lines}),
        "rounds": len({line.round for line in lines}),
        "incidents": [incidents.to_line(incident) for incident in incidents.read(folder / "record")],
        "codes": codes,
    }


def run_overhead(*, steps: int, rounds: int, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds a step with heartbeat and snapshots in memory every 5 steps, over those without; runs in turn.

    Args:
        steps: Of a run.
        rounds: Runs of each kind.
        folder: For runs.
        say: Told of each pair.
    """
    ratios, seconds = [], defaultdict(list)
    for number in range(rounds):
        for arm in (_PLAIN, _GUARDED) if number % 2 else (_GUARDED, _PLAIN):
            with Scene(arm, SHAPE, folder / f"{arm.name}-{number}", Training(steps)) as scene:
                scene.wait(deadline_s=120 + steps)
                seconds[arm.name].append(block_s(read_lines(scene.folder)))
        ratios.append(seconds[_GUARDED.name][-1] / seconds[_PLAIN.name][-1])
        say(f"overhead {number + 1}: {100 * (ratios[-1] - 1):+.1f}%")
    return {
        "median_ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "step_s": {name: statistics.median(each) / _BLOCK for name, each in seconds.items()},
    }


def block_s(lines: Sequence[Line]) -> float:
    """Median seconds of five steps in a row, by rank 0's clock."""
    at_s = [line.at_s for line in lines if line.rank == 0][_WARM::_BLOCK]
    return statistics.median(later - earlier for earlier, later in pairwise(at_s))


def run_goodput(*, minutes: float, every_s: float, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """The share of the time that went into steps which stand, while a rank is killed so often.

    Args:
        minutes: How long.
        every_s: From fault to fault.
        folder: Of the run.
        say: Told of each fault.
    """
    with Scene(ARMS["hierdist"], SHAPE, folder, Training(1_000_000)) as scene:
        scene.steps_after(0, _WARM, deadline_s=90)
        began_s = time.monotonic()
        faults = 0
        while time.monotonic() - began_s + every_s <= 60 * minutes:
            due_s = began_s + every_s * (faults + 0.5)
            scene.wait_for("its time", lambda lines, due_s=due_s: time.monotonic() >= due_s, deadline_s=2 * every_s)
            scene.kill_rank(faults)
            faults += 1
            say(f"goodput: fault {faults}, round {newest_round(scene.lines())}")
        end_s = began_s + every_s * faults
        scene.wait_for("its end", lambda lines: time.monotonic() >= end_s, deadline_s=2 * every_s)
        lines = scene.lines()
    standing = {line.step for line in lines if began_s < line.at_s <= end_s}
    step_s = block_s([line for line in lines if line.round == min(each.round for each in lines)]) / _BLOCK
    wall_s = end_s - began_s
    return {
        "faults": faults, "wall_s": wall_s, "steps": len(standing), "step_s": step_s,
        "goodput": len(standing) * step_s / wall_s,
    }  # fmt: skip
