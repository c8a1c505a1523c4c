"""Cases, drawn from their seeds: seed -> case is a pure function, and each case is of the kind that its set holds.

Seeds for making the rules better and seeds for judging them are apart, and nobody looks at the latter's runs before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.verdict.causes import HEALTHY_STRATEGIES, INJECTIONS, STRATEGIES, Injection
from benchmarks.verdict.nuisances import with_nuisances
from benchmarks.verdict.runs import Case, Injected, Run

PAIRS: tuple[tuple[Injected, Injected], ...] = (
    (Injected.SLOW_STORAGE, Injected.CHECKPOINTS),
    (Injected.SLOW_STORAGE, Injected.HOST_WORK),
    (Injected.SLOW_STORAGE, Injected.SLOW_LINK),
    (Injected.SLOW_STORAGE, Injected.SLOW_RANK),
    (Injected.SLOW_STORAGE, Injected.PLACEMENT),
    (Injected.SLOW_STORAGE, Injected.SMALL_BUCKETS),
    (Injected.SLOW_STORAGE, Injected.BUBBLE),
    (Injected.N_FOLD_READS, Injected.CHECKPOINTS),
    (Injected.N_FOLD_READS, Injected.SLOW_LINK),
    (Injected.N_FOLD_READS, Injected.SLOW_RANK),
    (Injected.SLOW_LINK, Injected.CHECKPOINTS),
    (Injected.SLOW_LINK, Injected.HOST_WORK),
    (Injected.SLOW_RANK, Injected.CHECKPOINTS),
    (Injected.SLOW_RANK, Injected.HOST_WORK),
    (Injected.NO_OVERLAP, Injected.CHECKPOINTS),
    (Injected.LOSSY_LINK, Injected.CHECKPOINTS),
    (Injected.LOSSY_LINK, Injected.SLOW_STORAGE),
    (Injected.PLACEMENT, Injected.CHECKPOINTS),
    (Injected.SMALL_BUCKETS, Injected.CHECKPOINTS),
    (Injected.BUBBLE, Injected.CHECKPOINTS),
    (Injected.BUBBLE, Injected.HOST_WORK),
    (Injected.HOST_WORK, Injected.CHECKPOINTS),
)
"""Causes that a run can have at once, each at its own expense."""


@dataclass(frozen=True)
class CaseSet:
    """Cases of one kind.

    Attributes:
        first_seed: The seeds go up from it.
        count: Cases wanted; those that do not count are made up for by further seeds.
        causes: In each run: 0, 1 or 2.
    """

    first_seed: int
    count: int
    causes: int


SETS: dict[str, CaseSet] = {
    "train": CaseSet(0, 100, 1),
    "train2": CaseSet(1_000, 40, 2),
    "train0": CaseSet(2_000, 30, 0),
    "judge": CaseSet(10_000, 200, 1),
    "judge2": CaseSet(20_000, 60, 2),
    "judge0": CaseSet(30_000, 50, 0),
}


def make_case(case_set: CaseSet, number: int) -> Case:
    """The case of the set's ``number``-th seed, counted from 0.

    Causes take turns, so that each is met equally often; all else is drawn.
    """
    seed = case_set.first_seed + number
    random_ = random.Random(seed)
    if case_set.causes == 0:
        run = _healthy(seed, random_, HEALTHY_STRATEGIES)
        run = replace(run, compute_s=1.4 * run.compute_s)  # clearly more than a run's overhead
        return Case(seed, _long_enough(with_nuisances(run, (), random_)), {})
    if case_set.causes == 1:
        cause = list(Injected)[number % len(Injected)]
        run = with_nuisances(_healthy(seed, random_, STRATEGIES[cause]), {cause}, random_)
        made = INJECTIONS[cause](run, random_.uniform(0.22, 0.55), random_)
        return Case(seed, _long_enough(made.run), {cause: _undone(made, made.run)})
    causes = PAIRS[number % len(PAIRS)]
    run = with_nuisances(_healthy(seed, random_, _common_strategies(causes)), causes, random_)
    injections = []
    for cause in causes:
        injections.append(INJECTIONS[cause](run, random_.uniform(0.32, 0.48), random_))
        run = injections[-1].run
    run = _long_enough(run)
    return Case(seed, run, {cause: _undone(made, run) for cause, made in zip(causes, injections, strict=True)})


def _healthy(seed: int, random_: random.Random, strategies: Sequence[str]) -> Run:
    strategy = random_.choice(strategies)
    run = Run(
        seed=seed,
        strategy=strategy,
        steps=random_.randint(32, 42),
        compute_s=random_.uniform(*((0.06, 0.09) if strategy == "zero2" else (0.035, 0.06))),  # zero2 does more on CPU
        jitter=random_.uniform(0.005, 0.04),
        width=random_.choice([384, 448, 512]),
        layers=1,
        batch_size=random_.choice([8, 16, 32]),
        sample_bytes=random_.choice([2048, 4096, 8192, 16384]),
    )
    # A few buckets, as a model of the usual size has: torch's default would put this small one into a single one.
    return replace(run, bucket_bytes=run.gradient_bytes // random_.choice([3, 4, 6]))


def _common_strategies(causes: Sequence[Injected]) -> list[str]:
    if Injected.BUBBLE in causes:
        return ["pipeline"]
    first, *others = (STRATEGIES[cause] for cause in causes)
    return [strategy for strategy in first if all(strategy in other for other in others)]


def _long_enough(run: Run) -> Run:
    """At least four checkpoints, where there are any."""
    return run if not run.save_every else replace(run, steps=max(run.steps, 4 * run.save_every + 2))


def _undone(made: Injection, run: Run) -> Run | None:
    return None if made.undo is None else made.undo(run)
