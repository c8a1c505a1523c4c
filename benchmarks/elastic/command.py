"""The command line of the benchmarks of failures; see :mod:`benchmarks.elastic.__main__`."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.elastic import faults, healthy, recovery
from benchmarks.elastic.arms import ARMS, SHAPES
from benchmarks.elastic.report import markdown
from benchmarks.record import RESULTS, commit, today

PARTS = ("recovery", "faults", "alarms", "overhead", "goodput")
Result = tuple[str, dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts asked for, and write what they gave after each."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(given)
    path = arguments.output or RESULTS / f"{today()}-elastic.json"
    lines = (arguments.output or RESULTS / "elastic.json").with_suffix(".faults.jsonl")  # whatever the day
    document = json.loads(path.read_text()) if path.exists() else {"results": {}}
    about = {"date": today(), "commit": commit(), "command": " ".join(["python -m benchmarks.elastic", *given])}
    with _folder(arguments.keep) as folder:
        for name, result in _results(arguments, folder, lines, functools.partial(print, flush=True)):
            document["results"][name] = {**about, **result}
            path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            path.with_suffix(".md").write_text("\n".join(markdown(document)) + "\n", encoding="utf-8")
    print(path)
    return 0


@contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        yield kept.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="hierdist-bench-") as folder:
        yield Path(folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["2x2", "3x1"], help="of recovery")
    parser.add_argument("--fault", nargs="+", choices=recovery.FAULTS, default=list(recovery.FAULTS))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="of recovery")
    parser.add_argument("--parallel", nargs="+", default=["ddp"], help="of recovery: ddp, zero2, zero3, ...")
    parser.add_argument("--trials", type=int, default=20, help="of each fault under us")
    parser.add_argument("--other-trials", type=int, default=5, help="of each fault under torchrun")
    parser.add_argument("--limit-s", type=float, default=120.0, help="after that, recovery is taken for never")
    parser.add_argument("--runs", type=int, default=34, help="more runs with random faults, nine each")
    parser.add_argument("--seed", type=int, help="of the first of them; default: the next one that is not there")
    parser.add_argument("--again", action="store_true", help="first, those runs that were not fine the last time")
    parser.add_argument("--keep", type=Path, help="folder for the runs, which stays; default: none does")
    parser.add_argument("--steps", type=int, default=2000, help="of the run that looks for false alarms")
    parser.add_argument("--rounds", type=int, default=36, help="pairs of turns for the overhead, of 20 steps each")
    parser.add_argument("--minutes", type=float, default=5.0, help="of the run for goodput")
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/<date>-elastic.json")
    return parser


def _results(arguments: argparse.Namespace, folder: Path, lines: Path, say: Callable[[str], None]) -> Iterator[Result]:
    if "recovery" in arguments.part:
        yield from _recoveries(arguments, folder / "recovery", say)
    if "faults" in arguments.part:
        yield (
            "faults",
            faults.run_faults(
                runs=arguments.runs,
                seed=arguments.seed,
                again=arguments.again,
                lines=lines,
                folder=folder / "faults",
                say=say,
            ),
        )
    if "alarms" in arguments.part:
        yield "alarms", healthy.run_alarms(steps=arguments.steps, folder=folder / "alarms")
    if "overhead" in arguments.part:
        yield "overhead", healthy.run_overhead(rounds=arguments.rounds, folder=folder / "overhead", say=say)
    if "goodput" in arguments.part:
        yield (
            "goodput",
            healthy.run_goodput(minutes=arguments.minutes, every_s=60.0, folder=folder / "goodput", say=say),
        )


def _recoveries(arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> Iterator[Result]:
    every = itertools.product(arguments.parallel, arguments.shape, arguments.fault, arguments.arms)
    for parallel, shape, fault, name in every:
        key, arm = f"recovery:{shape}:{fault}:{name}:{parallel}", ARMS[name]
        say(key)
        yield (
            key,
            recovery.run_trials(
                arm,
                SHAPES[shape],
                fault,
                parallel=parallel,
                trials=arguments.trials if arm.is_ours else arguments.other_trials,
                limit_s=arguments.limit_s,
                folder=folder / f"{shape}-{name}-{parallel}",
                say=say,
            ),
        )
