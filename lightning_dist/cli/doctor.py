"""``hierdist doctor``: train a little with any Lightning script, and say what bounds the step's time."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from lightning_dist.build.run_report import REPORT_FILE, write_report
from lightning_dist.cli.command import Command
from lightning_dist.cli.quantities import check_positive
from lightning_dist.config.checks import check_local
from lightning_dist.errors import ConfigError, LaunchError, RecordError
from lightning_dist.monitor.diagnosis import diagnose
from lightning_dist.monitor.diagnosis.wording import ranks
from lightning_dist.monitor.doctor_notes import Examined, examined, notes_of
from lightning_dist.monitor.doctor_order import VARIABLE, DoctorOrder
from lightning_dist.monitor.doctor_scratch import scratch_for
from lightning_dist.monitor.outcome import wait_for_ranks
from lightning_dist.monitor.reading import reading_note
from lightning_dist.monitor.report.terminal import render
from lightning_dist.monitor.run_files import FACTS, read_run

STEPS, MINUTES = 200, 30.0
_OTHERS_S = 10.0  # for ranks of other hosts to close their files, and these to be seen here


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"optimizer steps (default: {STEPS})")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, metavar="M", help=f"at most so many minutes (default: {MINUTES:g})"
    )
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        metavar="FOLDER",
        help="where the record and the report go, and the script's own outputs meanwhile; the same, shared one on all "
        "hosts (default: doctor/ and the time)",
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="-- command", help="e.g. -- python train.py")


def _run(arguments: argparse.Namespace) -> int:
    command = arguments.script[1:] if arguments.script[:1] == ["--"] else arguments.script
    _check(arguments, command)
    folder = arguments.output or Path("doctor") / datetime.datetime.now().astimezone().strftime("%Y-%m-%d_%H-%M-%S")
    order = DoctorOrder(str(folder.absolute()), arguments.steps, arguments.minutes)
    order.notes.mkdir(parents=True, exist_ok=True)
    try:
        with scratch_for(order):
            status = _train(command, order)
        fit = examined(notes_of(order))
    finally:
        shutil.rmtree(order.notes, ignore_errors=True)
    if status:
        print(f"hierdist doctor: {command[0]} ended with {_said(status)}; see what it wrote above", file=sys.stderr)
    if fit is not None and fit.has_rank_0:
        try:
            _say_verdict(fit, folder)
        except RecordError:
            if not status:
                raise
    else:
        with contextlib.suppress(OSError):
            folder.rmdir()  # if nothing is in it
        if fit is not None:
            _say_who_says_it(fit)
        elif not status:
            raise RecordError(
                f"no step was recorded: {' '.join(command)} trained nothing with a Lightning Trainer, or with a Python "
                f"in which lightning-dist is not installed, or on hosts that have no folder {folder.absolute()}"
            )
    return status


def _say_verdict(fit: Examined, folder: Path) -> None:
    if not fit.has_all_ranks and not wait_for_ranks(fit.record, fit.world_size, timeout_s=_OTHERS_S):
        print(
            "hierdist doctor: not all steps of the ranks on other hosts are here; name a folder that all hosts share "
            f"(--output), or copy what these ranks wrote to this host and run: hierdist report {fit.record} COPY",
            file=sys.stderr,
        )
    record = read_run(fit.record)
    for problem in record.problems:
        print(f"hierdist doctor: {problem}", file=sys.stderr)
    verdict = diagnose(record)
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.print(render(record, verdict))
    note = reading_note(record)
    if note is not None:
        console.print(note, highlight=False, markup=False)
    path = folder / REPORT_FILE
    write_report(record, verdict, path, folder=folder)
    console.print(f"report: {path}", highlight=False, markup=False, soft_wrap=True)


def _say_who_says_it(fit: Examined) -> None:
    """Rank 0 is on another host, where a doctor says the verdict."""
    here = f"hierdist doctor: {ranks(fit.ranks)} of {fit.world_size} trained here"
    if (fit.record / FACTS).exists():
        print(
            f"{here}; the doctor on the host of rank 0 says the verdict, and writes {fit.record.parent / REPORT_FILE}"
        )
        return
    shutil.rmtree(fit.scratch, ignore_errors=True)  # as rank 0's doctor does there
    print(
        f"{here} and left their part in {fit.record}, which the host of rank 0 does not share. For a verdict over all "
        f"ranks name a folder that all hosts share (--output), or copy that folder to the host of rank 0, there as "
        f"COPY, and run there: hierdist report {fit.record} COPY"
    )


def _check(arguments: argparse.Namespace, command: list[str]) -> None:
    if not command:
        raise ConfigError("there is no command to examine; write it after --: hierdist doctor -- python train.py")
    if arguments.steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {arguments.steps}")
    check_positive("--minutes", arguments.minutes, example="30")
    check_local("--output", arguments.output)
    if VARIABLE in os.environ:
        raise ConfigError("this is a doctor's patient already; run hierdist doctor around the whole command")


def _train(command: list[str], order: DoctorOrder) -> int:
    """Run it with its output as it is. Ctrl-C ends the training, and what was seen until then is judged."""
    try:
        process = subprocess.Popen(command, env={**os.environ, VARIABLE: order.to_text()})
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error}") from error
    while True:
        try:
            return _status(process.wait())
        except KeyboardInterrupt:
            continue  # the command got it too


def _status(code: int) -> int:
    return code if code >= 0 else 128 - code


def _said(status: int) -> str:
    known = {int(each) for each in signal.valid_signals()}
    return f"status {status} ({signal.strsignal(status - 128)})" if status - 128 in known else f"status {status}"


DOCTOR = Command(
    "Train a little with any Lightning script, unedited, and say what bounds the step's time.", _add_arguments, _run
)
