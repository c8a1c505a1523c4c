"""``hierdist ab``: train two ways with the same seeds, and say whether the second one is safe here."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_dist.cli.ab_hosts import Meeting, add_arguments, meeting, run_other_host
from lightning_dist.cli.command import Command
from lightning_dist.cli.composing import check_composes
from lightning_dist.cli.quantities import check_positive
from lightning_dist.config.checks import check_local
from lightning_dist.errors import ConfigError, RecordError
from lightning_dist.experiment.arms import ARMS, Experiment, RunName, parse_arm, said
from lightning_dist.experiment.comparison import Comparison, compare
from lightning_dist.experiment.curves import LOSS
from lightning_dist.experiment.hosts import FirstHost
from lightning_dist.experiment.page import html_of
from lightning_dist.experiment.performing import OnEnd, pairs_of, perform
from lightning_dist.experiment.running import CURVE_VARIABLE
from lightning_dist.experiment.store import REPORT_FILE, RESULT_FILE, Outcome, Store, default_folder
from lightning_dist.experiment.terminal import failure, render
from lightning_dist.experiment.verdict import Answer, Margin
from lightning_dist.experiment.words import headline
from lightning_dist.monitor.report.quantities import text

STATUS = {Answer.SAFE: 0, Answer.NOT_SAFE: 1, Answer.NOT_ENOUGH: 3}
_INTERRUPTED = 130


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--a",
        action="append",
        required=True,
        metavar="OVERRIDES",
        help='what is used so far: one override or several, "sync=hierarchical model=gpt-tiny"; "" is none',
    )
    parser.add_argument("--b", action="append", required=True, metavar="OVERRIDES", help="what is judged")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="pairs of runs (default: 5)")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps of a run (default: the command's own)")
    parser.add_argument(
        "--margin",
        default="1%",
        metavar="M",
        help="how much worse b may be: 1%% of the loss of a, or 0.02abs in units of the loss (default: 1%%)",
    )
    parser.add_argument(
        "--metric", default=LOSS, help=f"{LOSS} (of training), or what validation logs, e.g. val_loss (default: {LOSS})"
    )
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        metavar="FOLDER",
        help="where runs and the report are kept; with several hosts, one that all share (default: outputs/ab/ and a "
        "name made of the arms)",
    )
    parser.add_argument(
        "--a-from",
        type=Path,
        metavar="FOLDER",
        help="take the runs of a from another experiment that differs in --b only, where it has them",
    )
    parser.add_argument("--fresh", action="store_true", help="forget the runs that are done")
    parser.add_argument("--run-minutes", type=float, metavar="M", help="end a run that takes longer")
    parser.add_argument(
        "--seed-option", default="seed", metavar="NAME", help="the override of the seed (default: seed)"
    )
    parser.add_argument(
        "--steps-option",
        default="trainer.max_steps",
        metavar="NAME",
        help="the override of the number of steps (default: trainer.max_steps)",
    )
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="what trains, as you run it; overrides are put where it says {}, or at its end",
    )


def _run(arguments: argparse.Namespace) -> int:
    experiment, margin = _asked(arguments)
    where = meeting(arguments, os.environ)
    folder = arguments.output or default_folder(experiment)
    console = Console(stderr=arguments.json) if sys.stdout.isatty() else Console(width=140, stderr=arguments.json)
    with _ending_on_sigterm():
        if where is None or where.leads:
            return _lead(experiment, margin, arguments, folder, where, console)
        limit_s = _limit_s(arguments)
        on_end = _on_end(console)
        try:
            return run_other_host(where, experiment, folder, limit_s=limit_s, console=console, on_end=on_end)
        except KeyboardInterrupt:
            print("\nhierdist ab: interrupted; the first host ends too", file=sys.stderr)
            return _INTERRUPTED


def _lead(
    experiment: Experiment,
    margin: Margin,
    arguments: argparse.Namespace,
    folder: Path,
    where: Meeting | None,
    console: Console,
) -> int:
    if arguments.seeds < 2:
        print("hierdist ab: one pair shows no spread, so there will be no verdict; --seeds 5", file=sys.stderr)
    if arguments.fresh and (folder / "experiment.json").is_file():
        shutil.rmtree(folder)
    with Store(folder, experiment) as store, contextlib.ExitStack() as stack:
        console.print(f"runs are kept in {folder}; the same command goes on there", highlight=False, markup=False)
        if arguments.a_from is not None:
            taken = store.take([RunName("a", seed) for seed in range(arguments.seeds)], arguments.a_from)
            console.print(f"{len(taken)} runs of a are taken from {arguments.a_from}", highlight=False, markup=False)
        try:
            hosts = None if where is None else stack.enter_context(where.first_host(experiment, console.print))
            outcomes = _perform(experiment, arguments, store, console, hosts)
        except KeyboardInterrupt:
            print(f"\nhierdist ab: interrupted; the same command goes on in {folder}", file=sys.stderr)
            return _INTERRUPTED
        failed = {name: outcome for name, outcome in outcomes.items() if not outcome.is_good}
        pairs = pairs_of(range(arguments.seeds), outcomes, store)
        if not pairs:
            raise RecordError(
                f"there is no pair of runs of which both came to their end; what they printed is in {folder}"
            )
        comparison = compare(pairs, margin=margin, metric=arguments.metric)
        report = store.write(REPORT_FILE, html_of(experiment, comparison, failed))
        result = json.dumps(_values(experiment, comparison, failed), indent=1)
        store.write(RESULT_FILE, result)
        if arguments.json:
            print(result)
        else:
            console.print(render(experiment, comparison, failed))
            console.print(f"report: {report}", highlight=False, markup=False, soft_wrap=True)
        status = STATUS[comparison.judgement.answer]
        if hosts is not None:
            hosts.over(headline(comparison), status)
    return status


def _asked(arguments: argparse.Namespace) -> tuple[Experiment, Margin]:
    """What is asked for, refused before anything starts where it cannot be."""
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    experiment = Experiment(
        a=parse_arm("--a", arguments.a),
        b=parse_arm("--b", arguments.b),
        command=tuple(words),
        steps=arguments.steps,
        seed_option=arguments.seed_option,
        steps_option=arguments.steps_option,
    )
    margin = Margin.parse(arguments.margin)
    if arguments.seeds < 1:
        raise ConfigError(f"--seeds must be at least 1, better 5, got {arguments.seeds}")
    if arguments.run_minutes is not None:
        check_positive("--run-minutes", arguments.run_minutes, example="30")
    check_local("--output", arguments.output)
    check_local("--a-from", arguments.a_from)
    if CURVE_VARIABLE in os.environ:
        raise ConfigError("this is a run of another hierdist ab; put one around the whole command")
    if shutil.which(words[0]) is None:
        raise ConfigError(f"{words[0]} is no program that can be found; write the command as you run it by hand")
    for arm in ARMS:
        try:
            check_composes(words, experiment.of_run(RunName(arm, 0), folder="."))
        except ConfigError as error:
            raise ConfigError(f"--{arm} ({said(experiment.overrides(arm))}): {error}") from error
    return experiment, margin


def _perform(
    experiment: Experiment, arguments: argparse.Namespace, store: Store, console: Console, hosts: FirstHost | None
) -> dict[RunName, Outcome]:
    def on_start(name: RunName, place: int, count: int) -> None:
        overrides = said(experiment.overrides(name.arm))
        line = f"run {place} of {count}: {name.arm} ({overrides}), seed {name.seed} ..."
        console.print(line, end=" ", highlight=False, markup=False)

    seeds = range(arguments.seeds)
    outcomes = perform(
        experiment,
        seeds,
        store,
        environ=os.environ,
        limit_s=_limit_s(arguments),
        on_start=on_start,
        on_end=_on_end(console),
        hosts=hosts,
    )
    if len(outcomes) < 2 * arguments.seeds:
        console.print("no run of one arm works: the rest is not tried", style="red", highlight=False)
    return outcomes


def _on_end(console: Console) -> OnEnd:
    def on_end(name: RunName, outcome: Outcome) -> None:
        said_end = text(outcome.seconds, "s")
        console.print(said_end if outcome.is_good else f"failed after {said_end}", highlight=False, markup=False)
        if not outcome.is_good:
            console.print(failure(name, outcome))

    return on_end


def _limit_s(arguments: argparse.Namespace) -> float | None:
    return None if arguments.run_minutes is None else float(arguments.run_minutes * 60)


def _values(experiment: Experiment, comparison: Comparison, failed: dict[RunName, Outcome]) -> dict[str, Any]:
    """The result as JSON values."""
    return {
        "verdict": headline(comparison),
        "experiment": dataclasses.asdict(experiment),
        "metric": comparison.metric,
        "window": comparison.window,
        "steps": comparison.steps,
        "seeds": [pair.seed for pair in comparison.pairs],
        "judgement": dataclasses.asdict(comparison.judgement),
        "quantities": [dataclasses.asdict(quantity) for quantity in comparison.quantities],
        "notes": list(comparison.notes),
        "failed": {str(name): dataclasses.asdict(outcome) for name, outcome in failed.items()},
    }


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Being asked to end is an exception, so that the run that goes on is ended too."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


AB = Command("Train two ways with the same seeds, and say whether the second one is safe here.", _add_arguments, _run)
