"""``hierdist report``: what a run was, as one HTML file, on the terminal, or as a trace."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from lightning_dist.build.run_report import REPORT_FILE, write_report
from lightning_dist.cli.command import Command
from lightning_dist.errors import ConfigError, RecordError
from lightning_dist.monitor.diagnosis import diagnose
from lightning_dist.monitor.record import RunRecord
from lightning_dist.monitor.report.terminal import render
from lightning_dist.monitor.report.trace import write_trace
from lightning_dist.monitor.report.words import headline
from lightning_dist.monitor.rounds import WholeRun
from lightning_dist.monitor.run_folders import locate
from lightning_dist.monitor.whole_run import read_whole


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        nargs="+",
        type=Path,
        help="folder of a run, or one above it: the newest run below is meant; several: the parts of one run, of hosts "
        "that had no folder in common",
    )
    parser.add_argument(
        "--output", "-o", type=Path, metavar="FILE", help=f"the HTML file (default: {REPORT_FILE} in the run)"
    )
    parser.add_argument(
        "--round", type=int, metavar="N", help="only this round of a run whose ranks were started several times"
    )
    parser.add_argument("--step", type=int, metavar="N", help="open the timeline at this step, not at the average")
    parser.add_argument("--terminal", action="store_true", help="print the report instead of writing HTML")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="also write a trace for https://ui.perfetto.dev")


def _run(arguments: argparse.Namespace) -> int:
    found = locate(*arguments.run)
    whole = read_whole(*found.folders)
    if arguments.round is not None:
        whole = _round(whole, arguments.round)
    record, every = whole.main, whole.joined
    folder = found.folders[0]
    if arguments.step is not None:
        _check_step(every, arguments.step)
    if found.passed_over:
        count = found.passed_over
        older = f"{count} older run{'' if count == 1 else 's'} there {'is' if count == 1 else 'are'} left out"
        print(f"hierdist: {folder}, the newest run; {older}", file=sys.stderr)
    for problem in (*found.problems, *every.problems):
        print(f"hierdist: {problem}", file=sys.stderr)
    verdict = diagnose(record)
    if arguments.terminal:
        # A file or a pipe has no width to keep to.
        console = Console() if sys.stdout.isatty() else Console(width=160)
        console.print(render(record, verdict, whole=whole))
    if arguments.output is not None or not arguments.terminal:
        output = arguments.output or folder / REPORT_FILE
        write_report(record, verdict, output, folder=folder, step=arguments.step, whole=whole)
        print(f"{headline(verdict)}\n{output}")
    if arguments.trace is not None:
        if arguments.trace.is_dir():
            raise RecordError(f"{arguments.trace} cannot be written: it is a folder; name a file in it (--trace)")
        try:
            write_trace(every, arguments.trace, incidents=whole.incidents)
        except OSError as error:
            raise RecordError(f"{arguments.trace} cannot be written: {error}") from error
        print(arguments.trace)
    return 0


def _round(whole: WholeRun, number: int) -> WholeRun:
    found = tuple(record for record in whole.rounds if record.facts.round == number)
    if not found:
        there = ", ".join(str(record.facts.round) for record in whole.rounds)
        raise ConfigError(f"--round {number}: the run has no such round; there is {there}")
    return WholeRun(found)


def _check_step(record: RunRecord, step: int) -> None:
    steps = {each.step for rank in record.ranks.values() for each in rank.steps}
    if step not in steps:
        there = f"{min(steps)} to {max(steps)} are there" if steps else "no step was recorded"
        raise ConfigError(f"--step {step}: the run has no such step; {there}")


REPORT = Command(
    "Show where the time of a run went: verdict, timeline, metrics; one HTML file, or on the terminal.",
    _add_arguments,
    _run,
)
