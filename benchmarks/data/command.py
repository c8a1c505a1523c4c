"""The command line of the benchmarks of data; see :mod:`benchmarks.data.__main__`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.data import startup, waiting
from benchmarks.data.arms import ARMS
from benchmarks.data.formats import SAMPLE_BYTES
from benchmarks.data.scenarios import SCENARIOS, DataSets, run_scenario
from benchmarks.record import RESULTS, commit, today


def _waiting(folder: Path, arms: Sequence[str], rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    data = DataSets(folder / "waiting", num_samples=(64 << 20) // SAMPLE_BYTES, chunk_bytes=waiting.CHUNK_BYTES)
    return waiting.run_waiting(data, arms=arms, rounds=rounds, steps=16, say=say)


def _startup(folder: Path, arms: Sequence[str], rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    return startup.run_startup(folder / "holes", rounds=rounds, say=say)


OTHERS: dict[str, Callable[[Path, Sequence[str], int, Callable[[str], None]], dict[str, Any]]] = {
    "waiting": _waiting,
    "startup": _startup,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scenarios asked for and write what they gave."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data")
    parser.add_argument("--scenario", nargs="+", choices=[*SCENARIOS, *OTHERS], default=[*SCENARIOS, *OTHERS])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), help="these of a scenario's arms only")
    parser.add_argument("--rounds", type=int, default=3, help="of all arms")
    parser.add_argument("--limit-s", type=float, default=500.0, help="a scenario begins no round that would end later")
    parser.add_argument("--megabytes", type=int, default=256, help="of tokens")
    parser.add_argument("--chunk-megabytes", type=int, default=4, help="what is fetched at once")
    parser.add_argument("--batch-size", type=int, default=16, help="samples a rank")
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/<date>-data.json")
    arguments = parser.parse_args(argv)
    console = Console(width=150)
    path = arguments.output or RESULTS / f"{today()}-data.json"
    document = json.loads(path.read_text()) if path.exists() else {"results": {}}
    with tempfile.TemporaryDirectory(prefix="hierdist-bench-") as folder:
        data = DataSets(
            Path(folder) / "store",
            num_samples=arguments.megabytes * (1 << 20) // SAMPLE_BYTES,
            chunk_bytes=arguments.chunk_megabytes << 20,
        )
        for name in arguments.scenario:
            console.print(name)
            if name in OTHERS:
                result = OTHERS[name](
                    Path(folder), arguments.arms or list(waiting.WORKERS), arguments.rounds, console.print
                )
            else:
                scenario = SCENARIOS[name]
                if arguments.arms:
                    scenario = replace(scenario, arms=tuple(arm for arm in scenario.arms if arm in arguments.arms))
                result = run_scenario(
                    scenario,
                    data,
                    rounds=arguments.rounds,
                    batch_size=arguments.batch_size,
                    limit_s=arguments.limit_s,
                    say=console.print,
                )
                console.print(table(name, result))
            result["command"] = " ".join(["python -m benchmarks.data", *(sys.argv[1:] if argv is None else argv)])
            result["date"], result["commit"] = today(), commit()
            document["results"][name] = result
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"written: {path}")
    return 0


def table(name: str, result: dict[str, Any]) -> Table:
    """Of a scenario."""
    scenario = result["scenario"]
    base = next(iter(result["arms"]))
    where = "from disk" if not scenario["stored"] else f"{scenario['rate_mbit'] or 'no limit of'} Mbit/s"
    rows = Table(title=f"{name}: {' + '.join(map(str, scenario['ranks']))} ranks, {where}")
    for column in (
        "arm",
        "cold, samples/s",
        f"x {base}",
        "warm, samples/s",
        f"x {base}",
        "first batch, s",
        "link / data set",
        "lost",
        "again",
    ):
        rows.add_column(column, justify="left" if column == "arm" else "right")
    for arm, row in result["arms"].items():
        epochs = row["epochs"]
        rows.add_row(
            arm,
            f"{row['cold_samples_per_s']:,.0f}",
            _ratio(row["times_of_first"].get("cold")),
            f"{row['warm_samples_per_s']:,.0f}" if row["warm_samples_per_s"] else "-",
            _ratio(row["times_of_first"].get("warm")),
            f"{row['first_batch_s']:.2f}",
            ", ".join(f"{epoch['link_over_size']:.3f}" for epoch in epochs),
            ", ".join(str(epoch["samples_lost"]) for epoch in epochs),
            ", ".join(str(epoch["samples_repeated"]) for epoch in epochs),
        )
    return rows


def _ratio(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['median']:.2f} ({spread['low']:.2f}-{spread['high']:.2f})"
