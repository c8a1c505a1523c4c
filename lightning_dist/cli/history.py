"""``hierdist history``: the runs that were, and which metric slipped since when."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_dist.cli.command import Command
from lightning_dist.cli.history_options import add_folder, folder_of
from lightning_dist.errors import ConfigError, RecordError, unknown_option
from lightning_dist.monitor.history.drift import RUNS_AT_LEAST, Drift, drifts, metrics_of, runs_needed, value_of
from lightning_dist.monitor.history.folder import read_history
from lightning_dist.monitor.history.series import KINDS
from lightning_dist.monitor.history.summary import RunSummary
from lightning_dist.monitor.report.quantities import SHARE, form_of, text

_MOST_DAYS = 100_000  # nearly as far back as dates go, and longer than runs are kept
_SHOWN = ("step", "samples_per_s", "data_wait", "exposed_communication_share")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_folder(parser)
    parser.add_argument("--metric", help=f"only this one: {', '.join(KINDS)}")
    parser.add_argument("--days", type=float, metavar="N", help="only runs of the last so many days")
    parser.add_argument(
        "--config",
        metavar="HASH",
        help="runs of this configuration, whose hash may be cut; default: that of the newest run, on its machines",
    )
    parser.add_argument("--all", action="store_true", help="list all runs; drifts are told of alike ones only")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.metric is not None and arguments.metric not in KINDS:
        raise unknown_option("--metric", arguments.metric, KINDS)
    if arguments.days is not None and not 0 < arguments.days < _MOST_DAYS:
        raise ConfigError(f"--days must be positive, and below {_MOST_DAYS:,}, got {arguments.days:g}")
    history = read_history(folder_of(arguments))
    for problem in history.problems:
        print(f"hierdist: {problem}", file=sys.stderr)
    runs = _recent(history.runs, arguments.days)
    if not runs:
        raise RecordError(f"{folder_of(arguments)} has no runs{' of these days' if arguments.days else ''}")
    alike = _alike(runs, arguments.config)
    found = drifts(alike, metric=arguments.metric)
    shown = runs if arguments.all else alike
    if arguments.json:
        print(
            json.dumps({"runs": [_plain(run) for run in shown], "drifts": [_drift(each) for each in found]}, indent=1)
        )
    else:
        _print(shown, found, metric=arguments.metric, alike=alike, others=len(runs) - len(shown))
    return 0


def _recent(runs: Sequence[RunSummary], days: float | None) -> tuple[RunSummary, ...]:
    if days is None:
        return tuple(runs)
    since = datetime.now(timezone.utc) - timedelta(days=days)
    return tuple(run for run in runs if run.moment >= since)


def _alike(runs: Sequence[RunSummary], config: str | None) -> tuple[RunSummary, ...]:
    """Those that may be compared: of one configuration, number of ranks and kind of machines."""
    newest = runs[-1]
    if config is not None:
        found = _hash_of(runs, config)
        newest = [run for run in runs if run.config_hash == found][-1]
    return tuple(run for run in runs if run.is_like(newest))


def _hash_of(runs: Sequence[RunSummary], given: str) -> str:
    """The hash of a configuration that is given, or that begins with it."""
    hashes = sorted({run.config_hash for run in runs})
    found = [each for each in hashes if each == given] or [each for each in hashes if given and each.startswith(given)]
    if len(found) == 1:
        return found[0]
    what = "several configurations begin with it" if found else "no run has it"
    raise RecordError(f"--config {given or repr(given)}: {what}; there are: {', '.join(found or hashes)}")


def _plain(run: RunSummary) -> dict[str, object]:
    figures = {name: value_of(run, name) for name in run.metrics if name in KINDS}
    return {
        "run_id": run.run_id,
        "started": run.started,
        "config_hash": run.config_hash,
        "commit": run.commit,
        "cause": run.cause,
        "rounds": run.rounds,
        "incidents": run.incidents,
        "steps_lost": run.steps_lost,
        "goodput": run.goodput,
        "metrics": figures,
    }


def _drift(each: Drift) -> dict[str, object]:
    return {**dataclasses.asdict(each), "change": each.change}


def _print(
    runs: Sequence[RunSummary],
    found: Sequence[Drift],
    *,
    metric: str | None,
    alike: Sequence[RunSummary],
    others: int,
) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=160)
    metrics = (metric,) if metric else _SHOWN
    table = Table(title="runs", title_justify="left")
    elastic = ("incidents", "goodput") if any(run.incidents or run.rounds > 1 for run in runs) else ()
    for name in ("run", "started", "configuration", "commit", "ranks", *elastic, *metrics, "main cause"):
        table.add_column(name, justify="right" if name in (*metrics, *elastic, "ranks") else "left")
    for run in runs:
        figures = (
            text(value_of(run, name), form_of(name, KINDS[name].unit)) if name in run.metrics else ""
            for name in metrics
        )
        commit = (run.commit or "")[:10]
        cause = run.cause or ""
        size = (str(run.world_size), *((str(run.incidents), text(run.goodput, SHARE)) if elastic else ()))
        cells = (run.run_id[:12], run.started, run.config_hash[:8], commit, *size, *figures, cause)
        table.add_row(*map(Text, cells))  # not markup, whatever is in them
    console.print(table)
    if others:
        console.print(f"{_runs(others)} of other configurations or machines left out; --all lists them", style="dim")
    for each in found:
        style = {True: "red", False: "green", None: "yellow"}[each.is_worse]
        verb = {True: "slipped", False: "improved", None: "changed"}[each.is_worse]
        by = "" if each.change is None else f" by {each.change:+.1%}"
        before, after = (text(value, form_of(each.metric, each.unit)) for value in (each.before, each.after))
        said = f"{each.metric} {verb}{by}, from {before} to {after}, since {each.since} (run {each.run_id[:12]}; "
        console.print(f"{said}{each.runs} runs; p {each.p:.2g})", style=style, highlight=False, markup=False)
    looked_at = [name for name in metrics_of(alike) if metric in (None, name)]
    needed = runs_needed(len(looked_at))
    if len(alike) < RUNS_AT_LEAST:
        console.print(f"{_runs(len(alike))} alike; from {RUNS_AT_LEAST} on, drifts are looked for", highlight=False)
    elif not found and len(alike) < needed:
        console.print(
            f"{_runs(len(alike))} alike; of {len(looked_at)} metrics together, even a clear drift is not more than "
            f"chance before there are {needed}: name one with --metric",
            highlight=False,
        )
    elif not found:
        console.print(f"no metric drifts over the {len(alike)} runs that are alike", highlight=False)


HISTORY = Command("List runs, and say which metric slipped since when.", _add_arguments, _run)


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"
