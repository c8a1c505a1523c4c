"""How long a checkpoint holds training, how late it makes it, and how long it takes to be on disk, beside alternatives.

    python -m benchmarks.checkpoint --rounds 3
    python -m benchmarks.checkpoint --arms hierdist_async lightning --parameters 20e6
    python -m benchmarks.checkpoint --placement own_core --arms hierdist_async nothing

Two ranks with the same model and AdamW, so 12 bytes of state a parameter; each arm trains a few steps, saves, and
trains on, again and again. The first save of a run is left out: it allocates. Arms take turns.

- ``stall``: how long the call of a save holds the loop;
- ``late``: how much later than by undisturbed steps the loop is some steps after the save, the call included: what an
  asynchronous save only puts off is in here;
- ``longest``: by how much the longest of these steps is longer than an undisturbed one;
- ``durable``: how long a save takes until all of it is written, when it is waited for at once;
- ``unfinished``: how long the write went on after those steps;
- ``step`` and ``step while writing``: undisturbed steps, and those that began and ended during a write.

``copy`` is a plain copy of the state by each rank into memory that is there; ``nothing`` saves nothing and shows what
of ``late`` is noise. With ``--placement own_core`` there is one rank, whose training has a core, and whose other
threads have another; ``neighbour_copy`` and ``neighbour_write`` are processes without torch that copy, or write as
much, on that other core: what any writer costs on this machine. Ratios are taken within a round. Beside them is noted
which share of the machine's cores other processes had. Results go to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoint_arms import ARMS, Times, run_arm
from benchmarks.ending import clean_up_when_terminated
from benchmarks.record import RESULTS, commit, today
from tests.support.ranks import RankPool

DEFAULT_ARMS = (
    "hierdist_async",
    "hierdist_overlapped",
    "lightning",
    "lightning_async_io",
    "dcp",
    "dcp_async",
    "dcp_async_overlapped",
    "copy",
    "nothing",
)
KEYS = ("stall", "late", "longest", "durable", "unfinished", "step", "step while writing")  # seconds


class Target(NamedTuple):
    """A ratio that is wanted, of the same round."""

    key: str
    arm: str
    other_key: str
    other: str
    at_most: float


TARGETS = tuple(
    target
    for own in ("hierdist_async", "hierdist_overlapped")
    for target in (
        Target("stall", own, "stall", "lightning", 1 / 20),
        Target("stall", own, "stall", "copy", 1.5),
        Target("stall", own, "stall", "lightning_async_io", 1 / 10),
        Target("stall", own, "stall", "dcp_async", 1 / 10),
        Target("durable", own, "durable", "dcp", 1.1),
        Target("late", own, "late", "lightning", 1.0),
        Target("late", own, "late", "dcp_async", 1.0),
        Target("late", own, "late", "lightning_async_io", 1.0),
    )
) + tuple(
    Target("step while writing", arm, "step", arm, 1 / 0.9)
    for arm in ("hierdist_async", "hierdist_overlapped", "dcp_async", "neighbour_copy", "neighbour_write")
)


def run_once(pool: RankPool, arm: str, arguments: argparse.Namespace) -> Times:
    """One run of an arm; the slowest rank's times."""
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    own_core = arguments.placement == "own_core"
    try:
        ranks = pool.run(
            run_arm,
            world_size=1 if own_core else 2,
            args=(arm, arguments.parameters, str(folder)),
            kwargs={"own_core": own_core},
            deadline_s=300,
        )
    finally:
        shutil.rmtree(folder)
    return {key: [max(values) for values in zip(*(r[key] for r in ranks), strict=False)] for key in KEYS}


class Others:
    """What of the machine other processes take, from when it is made."""

    def __init__(self) -> None:
        self._start = self._seconds()

    def share(self) -> float:
        """Of all cores."""
        busy, own, idle = (now - then for now, then in zip(self._seconds(), self._start, strict=True))
        return max(0.0, busy - own) / (busy + idle)

    def _seconds(self) -> tuple[float, float, float]:
        cores = psutil.cpu_times()
        idle = cores.idle + cores.iowait
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        own = [process.cpu_times() for process in family]
        return sum(cores) - idle - cores.guest - cores.guest_nice, sum(t.user + t.system for t in own), idle


def median(times: Sequence[Times], key: str) -> float | None:
    """Over runs; ``None`` where there is nothing."""
    values = [value for each in times for value in each[key]]
    return statistics.median(values) if values else None


def due(rounds: dict[str, list[Times]], arms: Sequence[str], wanted: int) -> str | None:
    """The next arm, one round after another; ``None`` if all have as many as are wanted."""
    arm = min(arms, key=lambda each: len(rounds.get(each, ())))  # of several, the first
    return arm if len(rounds.get(arm, ())) < wanted else None


def ratios(rounds: dict[str, list[Times]], target: Target) -> list[float]:
    """Of each round."""
    found = []
    for own, other in zip(rounds.get(target.arm, ()), rounds.get(target.other, ()), strict=False):
        above, below = median([own], target.key), median([other], target.other_key)
        if above is not None and below:
            found.append(above / below)
    return found


def summary(rounds: dict[str, list[Times]]) -> dict[str, Any]:
    """Medians of each arm, and how targets are met."""
    targets = []
    for target in TARGETS:
        found = ratios(rounds, target)
        if found:
            spread = {"median": statistics.median(found), "least": min(found), "most": max(found)}
            targets.append({**target._asdict(), **spread})
    return {
        "medians": {arm: {key: median(runs, key) for key in (*KEYS, "others")} for arm, runs in rounds.items()},
        "ratios": targets,
    }


def show(found: dict[str, Any]) -> None:
    """Two tables."""
    console = Console(width=140)
    table = Table("arm", *(f"{key}, s" for key in KEYS), "others")
    for arm, medians in found["medians"].items():
        table.add_row(arm, *("-" if value is None else f"{value:.3f}" for value in medians.values()))
    console.print(table)
    table = Table("ratio", "at most", "median", "least", "most")
    for each in found["ratios"]:
        name = f"{each['key']} of {each['arm']} / {each['other_key']} of {each['other']}"
        table.add_row(name, *(f"{each[key]:.3f}" for key in ("at_most", "median", "least", "most")))
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the arms in turn and write what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of each arm, with those that --append finds")
    parser.add_argument(
        "--others", type=float, default=1.0, help="do a run again if other processes had more of all cores than this"
    )
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no arm after so many seconds")
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--placement", default="shared", choices=["shared", "own_core"])
    parser.add_argument("--arms", nargs="+", default=list(DEFAULT_ARMS), choices=list(ARMS))
    parser.add_argument("--folder", type=Path, help="where to write checkpoints (default: a temporary folder)")
    parser.add_argument(
        "--output", type=Path, help="JSON file; default: benchmarks/results/<date>-checkpoint-loop.json"
    )
    parser.add_argument("--append", action="store_true", help="go on with the rounds of the file")
    arguments = parser.parse_args(argv)
    output = arguments.output or RESULTS / f"{today()}-checkpoint-loop.json"
    document: dict[str, Any] = {"date": today(), "runs": {}}
    if arguments.append and output.exists():
        document = json.loads(output.read_text())
    run = document["runs"].setdefault(arguments.placement, {"commands": [], "parameters": arguments.parameters})
    run["commands"].append(
        f"{commit()}: " + " ".join(["python -m benchmarks.checkpoint", *(sys.argv[1:] if argv is None else argv)])
    )
    rounds: dict[str, list[Times]] = run.setdefault("rounds", {})
    for runs in rounds.values():
        runs[:] = [each for each in runs if each["others"][0] <= arguments.others]
    end_s = time.monotonic() + arguments.limit_s
    with RankPool() as pool:
        while time.monotonic() < end_s and (arm := due(rounds, arguments.arms, arguments.rounds)) is not None:
            others = Others()
            times = run_once(pool, arm, arguments)
            times["others"] = [others.share()]
            print(arm, {key: [round(v, 3) for v in values] for key, values in times.items()}, flush=True)
            if times["others"][0] > arguments.others:
                continue
            rounds.setdefault(arm, []).append(times)
            run.update(summary(rounds))
            output.write_text(json.dumps(document, indent=1) + "\n")
    show(run)
    return 0


if __name__ == "__main__":
    clean_up_when_terminated()
    raise SystemExit(main())
