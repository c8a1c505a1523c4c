"""The runs of an experiment, one after another, but for those that are done."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lightning_dist.errors import RecordError
from lightning_dist.experiment.arms import Experiment, RunName, schedule
from lightning_dist.experiment.comparison import Pair
from lightning_dist.experiment.curves import read_curve
from lightning_dist.experiment.hosts import FirstHost, OtherHost
from lightning_dist.experiment.running import run_once
from lightning_dist.experiment.store import Outcome, Store

FAILURES_AT_MOST = 2
"""Of an arm of which no run was good: then the rest is not tried."""

OnStart = Callable[[RunName, int, int], None]
"""Called with a run, its place from 1, and how many there are."""

OnEnd = Callable[[RunName, Outcome], None]


def perform(
    experiment: Experiment,
    seeds: Sequence[int],
    store: Store,
    *,
    environ: Mapping[str, str],
    limit_s: float | None,
    on_start: OnStart,
    on_end: OnEnd,
    hosts: FirstHost | None = None,
) -> dict[RunName, Outcome]:
    """Run what is not done yet, in the order of the schedule.

    Args:
        experiment: What to run.
        seeds: A pair each.
        store: Where runs are kept.
        environ: Environment of the commands.
        limit_s: How long a run may take; ``None``: as long as it wants.
        on_start: Told before each run.
        on_end: Told after it.
        hosts: The other hosts of the experiment; ``None``: there are none, or the command starts them.

    Returns:
        How each ended; those that were not tried, since their arm never works, are not there.

    Raises:
        LaunchError: The command is no program, or another host has left.
        RecordError: The folder cannot be written.
    """
    names = list(schedule(seeds))
    outcomes: dict[RunName, Outcome] = {}
    good: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for name in names:
        known = store.outcome(name)
        if known is not None and known.is_good:
            outcomes[name] = known
            good[name.arm] += 1
    for place, name in enumerate(names, start=1):
        if name in outcomes:
            continue
        if any(failures[arm] >= FAILURES_AT_MOST and not good[arm] for arm in failures):
            break
        on_start(name, place, len(names))
        outcomes[name] = _run(experiment, name, store, environ, limit_s, hosts)
        (good if outcomes[name].is_good else failures)[name.arm] += 1
        on_end(name, outcomes[name])
    return outcomes


def pairs_of(seeds: Sequence[int], outcomes: Mapping[RunName, Outcome], store: Store) -> list[Pair]:
    """The pairs of which both runs are good.

    Raises:
        RecordError: What a run has left cannot be read any more.
    """
    pairs = []
    for seed in seeds:
        names = [RunName(arm, seed) for arm in ("a", "b")]
        if all(name in outcomes and outcomes[name].is_good for name in names):
            first, second = (read_curve(store.curve_folder(name)) for name in names)
            is_in_turn = not any(outcomes[name].taken_from for name in names)
            pairs.append(Pair(seed, first, second, is_in_turn))
    return pairs


def follow(
    experiment: Experiment,
    first: OtherHost,
    folder: Path,
    *,
    host: str,
    environ: Mapping[str, str],
    limit_s: float | None,
    on_start: Callable[[RunName], None],
    on_end: OnEnd,
) -> tuple[str, int]:
    """Run what the first host says, until it says that all is over; the verdict and a status.

    Args:
        experiment: What this host was asked.
        first: The first host.
        folder: Of the experiment; it may be the first host's own.
        host: Name of this one.
        environ: Environment of the commands.
        limit_s: How long a run may take; ``None``: as long as it wants.
        on_start: Told before each run.
        on_end: Told after it.

    Raises:
        LaunchError: The command is no program, or the first host has ended.
        RecordError: The folder cannot be written.
    """
    while isinstance(name := first.next_run(), RunName):
        on_start(name)
        own = folder / str(name)
        curve = own / f"curve-{host}"
        try:
            shutil.rmtree(curve, ignore_errors=True)
            curve.mkdir(parents=True)
            outcome = run_once(
                experiment.command_of(name, folder=str((own / "run").absolute())),
                output=own / f"output-{host}.log",
                curve=curve,
                environ=environ,
                limit_s=limit_s,
                steps=experiment.steps,
                watch=first.watch,
            )
        except OSError as error:
            raise RecordError(f"{own} cannot be written: {error}") from error
        first.ended(outcome, curve)
        on_end(name, outcome)
    return name


def _run(
    experiment: Experiment,
    name: RunName,
    store: Store,
    environ: Mapping[str, str],
    limit_s: float | None,
    hosts: FirstHost | None,
) -> Outcome:
    try:
        store.begin(name)
        if hosts is not None:
            hosts.begin(name)
        outcome = run_once(
            experiment.command_of(name, folder=str((store.run_folder(name) / "run").absolute())),
            output=store.output_file(name),
            curve=store.curve_folder(name),
            environ=environ,
            limit_s=limit_s,
            steps=experiment.steps,
            watch=None if hosts is None else hosts.watch,
        )
        if hosts is not None:
            outcome = hosts.end(outcome, store.curve_folder(name))
    except OSError as error:
        raise RecordError(f"{store.run_folder(name)} cannot be written: {error}") from error
    store.end(name, outcome)
    return outcome
