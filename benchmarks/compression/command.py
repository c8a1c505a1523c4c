"""Less over the slow link: bytes, step time, time to a loss, beside Lightning's ddp and torch's hooks.

    python -m benchmarks.compression bytes              # of each scheme, by the link's counters
    python -m benchmarks.compression time --rounds 5    # seconds a step at 100 Mbit/s, and without a limit
    python -m benchmarks.compression loss FOLDER ...    # of hierdist ab, one a scheme, named after it
    python -m benchmarks.compression whole --arms int8  # whole runs on the link, to a loss
    python -m benchmarks.compression windows            # one sync for several micro-batches

Two hosts of two ranks are network namespaces. The arms alternate on the same hosts. Needs root and iproute2. Results go
to ``benchmarks/results/<date>-compression.json``, each part beside the others; ``python -m
benchmarks.compression.report`` makes tables of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.compression.arms import DDP, EXACT, OURS
from benchmarks.compression.losses import read
from benchmarks.compression.measuring import BYTE_ARMS, EVERY, count_bytes, time_steps, time_windows, train_whole
from benchmarks.ending import clean_up_when_terminated
from benchmarks.record import RESULTS, commit, today

RATE_MBIT = 100.0
ONEBIT_EXACT_STEPS = 60
"""A fifth of the 300 steps of whole runs, as 1-bit Adam wants it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one part, and keep it."""
    given = _parser().parse_args(argv)
    console = Console(width=150)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    path = given.output or RESULTS / f"{today()}-compression.json"
    written = f"python -m benchmarks.compression {' '.join(argv if argv is not None else sys.argv[1:])}".strip()
    for name, result in _measured(given, say, path):
        document = json.loads(path.read_text()) if path.exists() else {}
        document[name] = {"date": today(), "commit": commit(), "command": written, **result}
        path.write_text(json.dumps(document, indent=1) + "\n")
    say(f"written: {path}")
    return 0


def _measured(given: argparse.Namespace, say: Any, path: Path) -> Any:
    """Names and results, each as soon as it is there."""
    if given.part == "bytes":
        chosen = [arm for arm in BYTE_ARMS if not given.arms or arm.scheme in (EXACT, *given.arms)]
        yield "bytes", count_bytes(chosen, given.steps, say)
    elif given.part == "time":
        arms = given.arms or EVERY
        arms = [DDP, *(arm for arm in arms if arm != DDP)]
        for rate in (RATE_MBIT, None):
            name = f"time, {rate:g} Mbit/s" if rate else "time, no limit"
            for result in time_steps(arms, rate, given.rounds, given.steps, say):
                yield name, result
    elif given.part == "loss":
        yield "loss", read(given.folders)
    elif given.part == "whole":
        arms = {arm: ONEBIT_EXACT_STEPS if arm == "onebit" else 0 for arm in [DDP, *given.arms]}
        level = given.loss or json.loads(path.read_text())["loss"]["loss_to_reach"]
        for result in train_whole(arms, RATE_MBIT, level, range(given.seeds), given.steps, say):
            yield "whole", result
    else:
        for rate in (RATE_MBIT, None):
            name = f"windows, {rate:g} Mbit/s" if rate else "windows, no limit"
            for result in time_windows(rate, given.rounds, given.steps, say):
                yield name, result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compression",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = parser.add_subparsers(dest="part", required=True)
    for name, steps, arms in (("bytes", 8, tuple(OURS)), ("time", 20, EVERY), ("whole", 300, EVERY)):
        part = parts.add_parser(name)
        part.add_argument("--arms", nargs="+", choices=arms, default=["int8"] if name == "whole" else None)
        part.add_argument("--steps", type=int, default=steps, help="counted (default: %(default)s)")
    parts.choices["time"].add_argument("--rounds", type=int, default=5, help="of all arms (default: %(default)s)")
    parts.choices["whole"].add_argument("--seeds", type=int, default=1, help="runs of an arm (default: %(default)s)")
    parts.choices["whole"].add_argument("--loss", type=float, help="to be reached (default: that of the part loss)")
    windows = parts.add_parser("windows")
    windows.add_argument("--rounds", type=int, default=3, help="of all arms (default: %(default)s)")
    windows.add_argument("--steps", type=int, default=32, help="micro-batches that count (default: %(default)s)")
    loss = parts.add_parser("loss")
    loss.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    for part in parts.choices.values():
        part.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/<date>-compression.json")
    return parser


if __name__ == "__main__":
    clean_up_when_terminated()
    sys.exit(main(sys.argv[1:]))
