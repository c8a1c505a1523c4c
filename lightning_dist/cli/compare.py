"""``hierdist compare``: what is different in a second run, and whether that is more than chance."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_dist.cli.command import Command
from lightning_dist.cli.history_options import add_folder, folder_of
from lightning_dist.errors import RecordError, unknown_option
from lightning_dist.monitor.diagnosis import diagnose
from lightning_dist.monitor.history.comparison import LEVEL, Change, Comparison, Difference, compare
from lightning_dist.monitor.history.folder import named, read_history, read_summary
from lightning_dist.monitor.history.series import KINDS
from lightning_dist.monitor.history.summary import RunSummary, summarise
from lightning_dist.monitor.report.quantities import form_of, text
from lightning_dist.monitor.run_folders import locate
from lightning_dist.monitor.whole_run import read_whole

_COLOURS = {Change.BETTER: "green", Change.WORSE: "red", Change.CHANGED: "yellow"}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", help="the run that is compared with: its folder, its record in a history, or its id")
    parser.add_argument("second", help="the run that is judged")
    add_folder(parser)
    parser.add_argument("--metric", action="append", help="only this one; may be given several times")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _run(arguments: argparse.Namespace) -> int:
    for metric in arguments.metric or ():
        if metric not in KINDS:
            raise unknown_option("--metric", metric, KINDS)
    known = _known(arguments)
    first, second = (_read(name, known, arguments) for name in (arguments.first, arguments.second))
    comparison = compare(first, second, history=known)
    wanted = set(arguments.metric or KINDS)
    differences = tuple(each for each in comparison.differences if each.metric in wanted)
    if arguments.metric and not differences:
        raise RecordError(
            f"--metric {' '.join(arguments.metric)}: the runs have no such metric both; they have: "
            + ", ".join(each.metric for each in comparison.differences)
        )
    comparison = dataclasses.replace(comparison, differences=differences)
    if arguments.json:
        print(json.dumps({**dataclasses.asdict(comparison), "first": first.run_id, "second": second.run_id}, indent=1))
    else:
        _print(comparison, first, second, arguments)
    return 0


def _known(arguments: argparse.Namespace) -> tuple[RunSummary, ...]:
    folder = folder_of(arguments)
    if not folder.is_dir():
        return ()
    history = read_history(folder)
    for problem in history.problems:
        print(f"hierdist: {problem}", file=sys.stderr)
    return history.runs


def _read(name: str, known: tuple[RunSummary, ...], arguments: argparse.Namespace) -> RunSummary:
    path = Path(name)
    if path.is_dir():
        found = locate(path)
        if found.passed_over:
            print(f"hierdist: {name}: {found.folders[0]} is meant, the newest run there", file=sys.stderr)
        whole = read_whole(*found.folders)
        for problem in (*found.problems, *whole.joined.problems):
            print(f"hierdist: {problem}", file=sys.stderr)
        return summarise(whole.main, diagnose(whole.main), whole=whole)
    if path.is_file():
        return read_summary(path)
    if not known:
        raise RecordError(
            f"{name} is neither a folder nor a file, and there is no history in {folder_of(arguments)} in which it "
            "might be the id of a run; name another one with --history"
        )
    return named(known, name)


def _print(comparison: Comparison, first: RunSummary, second: RunSummary, arguments: argparse.Namespace) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=160)
    for name, given, run in (("first", arguments.first, first), ("second", arguments.second, second)):
        what = f"{given} ({run.run_id[:12]})" if not run.run_id.startswith(given) else run.run_id[:12]
        console.print(
            f"{name}: {what}, {run.started}, {run.strategy}, {run.world_size} ranks, {run.steps} steps. {run.verdict}",
            highlight=False,
            markup=False,
        )
    for note in comparison.notes:
        console.print(note, style="yellow", highlight=False, markup=False)
    if comparison.options:
        table = Table("option", "first", "second", title="options that differ", title_justify="left")
        for option, values in comparison.options.items():
            # Text is no markup, whatever is in it.
            table.add_row(Text(option), *(Text("-" if value is None else str(value)) for value in values))
        console.print(table)
    table = Table(title="metrics", title_justify="left")
    for column, justify in (("metric", "left"), ("first", "right"), ("second", "right"), ("change", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for column in ("95 % interval", "p", "verdict"):
        table.add_column(column, justify="left" if column == "verdict" else "right")
    for each in comparison.differences:
        table.add_row(*_row(each), style=_COLOURS.get(each.what))
    console.print(table)
    console.print(
        f"Mann-Whitney on blocks that are long against the steps' memory; p is Holm's, the level {LEVEL:g}. "
        "It says that two runs differ, not why.",
        highlight=False,
    )


def _row(each: Difference) -> tuple[str, ...]:
    interval = "" if each.low is None or each.high is None else f"{each.low:+.1%} to {each.high:+.1%}"
    what = {
        Change.UNKNOWN: _untold(each.times_longer),
        Change.SAME: "no difference to be seen",
        Change.USUAL: f"within the usual {each.usual or 0:.1%}",
    }
    return (
        each.metric,
        text(each.first, form_of(each.metric, each.unit)),
        text(each.second, form_of(each.metric, each.unit)),
        "" if each.change is None else f"{each.change:+.1%}",
        interval,
        "" if each.p is None else f"{each.p:.2g}",
        what.get(each.what, each.what.value),
    )


def _untold(times_longer: float | None) -> str:
    """``None``: not because runs are short, but since an earlier release kept something else."""
    if times_longer is None:
        return "cannot be tested"
    return f"too short to tell; {math.ceil(10 * times_longer) / 10:.1f} times as long might do"


COMPARE = Command("Compare two runs, metric by metric: what differs by more than chance.", _add_arguments, _run)
