"""What it costs when nothing fails, what is taken for a failure that is none, and the time that faults leave."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.elastic.arms import ARMS, Shape
from benchmarks.elastic.scene import NeverHappened, Scene, Training
from benchmarks.elastic.steps import Line, newest_round, read_lines
from benchmarks.elastic.turns import BLOCK, FIRST, give, median_interval, step_seconds
from lightning_dist import incidents

SHAPE = Shape(2, 2)
_WARM = 10  # steps that are not counted
_BLOCK = 5  # steps between two snapshots: each block has one
_TURN_S = 120.0
_REST_S = 0.3  # what a run still has to do after its turn is not to meet the other's
_LOOK_S = 0.05
_PLAIN = replace(ARMS["torchrun"], name="plain", training=("--storage-every", "0"))
_GUARDED = replace(ARMS["hierdist"], training=(*ARMS["hierdist"].training[:4], "--storage-every", "0"))


def run_alarms(*, steps: int, folder: Path) -> dict[str, Any]:
    """Healthy steps with saves, validation and a pause of 10 s: how many rounds and incidents there were.

    Args:
        steps: How many.
        folder: Of the run.
    """
    words = ("--model", "tiny", "--pass-s", "0.05", "0.05")  # short steps have short deadlines
    training = Training(steps, (*words, "--validate-every", "100", "--pause", f"{steps // 2}:10"))
    with Scene(ARMS["hierdist"], SHAPE, folder, training) as scene:
        codes = scene.wait(deadline_s=120 + steps)
    lines = read_lines(folder)
    return {
        "steps": len({line.step for line in lines}),
        "rounds": len({line.round for line in lines}),
        "incidents": [incidents.to_line(incident) for incident in incidents.read(folder / "record")],
        "codes": codes,
    }


def run_overhead(*, rounds: int, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds a step under our launcher with snapshots in memory every 5 steps, over those of torchrun without any.

    Two runs take turns, of 20 steps each; every two neighbouring turns give a ratio.

    Args:
        rounds: Turns of each run.
        folder: For runs.
        say: Told of each pair.
    """
    turns = folder / "turns"
    turns.mkdir(parents=True)
    steps = FIRST + rounds * BLOCK
    wall, cpu = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    with ExitStack() as stack:
        scenes = [
            stack.enter_context(
                Scene(arm, SHAPE, folder / arm.name, Training(steps, ("--turns", f"{turns}:{arm.name}")))
            )
            for arm in (_PLAIN, _GUARDED)
        ]
        for scene in scenes:
            scene.wait_for("the warm-up", _is_warm, deadline_s=_TURN_S)
        for number in range(rounds):
            for scene in scenes if number % 2 else scenes[::-1]:
                before_s = scene.processor_s()
                wall[scene.arm.name].append(_turn(scene, turns, number))
                cpu[scene.arm.name].append((scene.processor_s() - before_s) / BLOCK)
            say(f"overhead {number + 1}: {100 * (wall[_GUARDED.name][-1] / wall[_PLAIN.name][-1] - 1):+.1f}%")
    found: dict[str, Any] = {"pairs": rounds}
    for prefix, taken in (("", wall), ("cpu_", cpu)):
        ratios = [own / plain for own, plain in zip(taken[_GUARDED.name], taken[_PLAIN.name], strict=True)]
        found[f"{prefix}median_ratio"] = statistics.median(ratios)
        found[f"{prefix}spread"] = list(median_interval(ratios))
        found[f"{prefix}step_s"] = {name: statistics.median(each) for name, each in taken.items()}
    return found


def _is_warm(lines: Sequence[Line]) -> bool:
    return any(line.step == FIRST - 1 for line in lines)


def _turn(scene: Scene, turns: Path, number: int) -> float:
    """Let a run have its turn; seconds a step."""
    give(turns, scene.arm.name, number)
    ranks, end_s = SHAPE.num_hosts * SHAPE.ranks_per_host, time.monotonic() + _TURN_S
    while (found := step_seconds(turns, scene.arm.name, number, ranks=ranks)) is None:
        if time.monotonic() > end_s:
            raise NeverHappened(f"a turn did not end within {_TURN_S:g} s\n{scene.last_words()}")
        time.sleep(_LOOK_S)
    time.sleep(_REST_S)
    return statistics.mean(found)


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
            _wait_until(began_s + every_s * (faults + 0.5))
            scene.kill_rank(faults)
            faults += 1
            say(f"goodput: fault {faults}, round {newest_round(scene.lines())}")
        end_s = began_s + every_s * faults
        _wait_until(end_s)
        lines = scene.lines()
    standing = {line.step for line in lines if began_s < line.at_s <= end_s}
    step_s = block_s([line for line in lines if line.round == min(each.round for each in lines)]) / _BLOCK
    wall_s = end_s - began_s
    return {
        "faults": faults, "wall_s": wall_s, "steps": len(standing), "step_s": step_s,
        "goodput": len(standing) * step_s / wall_s,
    }  # fmt: skip


def _wait_until(due_s: float) -> None:
    time.sleep(max(0.0, due_s - time.monotonic()))
