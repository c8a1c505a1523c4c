"""What runs have a little of besides their causes, so that no trace alone gives a cause away.

Each costs a few percent at most: a store that is not free, links that have a rate, ranks that are numbered in turn
where that hardly matters, short checkpoints, a little work on the host, a rank that is a little slower.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import replace

from benchmarks.verdict.runs import WORLD_SIZE, Injected, Link, Reads, Run

_ON_LINKS = {Injected.SLOW_LINK, Injected.PLACEMENT, Injected.NO_OVERLAP, Injected.SMALL_BUCKETS, Injected.LOSSY_LINK}


def with_nuisances(run: Run, causes: Collection[Injected], random_: random.Random) -> Run:
    """The run with some of them, each by chance."""
    for chance, add in _NUISANCES:
        if random_.random() < chance:
            run = add(run, causes, random_)
    return run


def _reading(run: Run, causes: Collection[Injected], random_: random.Random) -> Run:
    seconds = run.compute_s * random_.uniform(0.005, 0.04)
    return replace(run, read_s_per_byte=seconds / (run.batch_size * run.sample_bytes), read_jitter=0.2)


def _rate(run: Run, causes: Collection[Injected], random_: random.Random) -> Run:
    """Backward hides most of it."""
    wire_s = run.backward_s * random_.uniform(0.15, 0.3)
    link = Link(1.55 * run.gradient_bytes * 8 / 1e6 / wire_s)
    return replace(run, links={"a": link, "b": link})


def _in_turn(run: Run, causes: Collection[Injected], random_: random.Random) -> Run:
    """Nothing to the hierarchical legs; and to a flat ring little, while links have no rate and are not the matter."""
    is_harmless = run.strategy != "ddp" or (not run.links and not _ON_LINKS & set(causes))
    return replace(run, is_cyclic=True) if is_harmless else run


def _saving(run: Run, causes: Collection[Injected], random_: random.Random) -> Run:
    every = random_.randint(6, 10)
    return replace(run, save_every=every, save_s=every * run.compute_s * random_.uniform(0.002, 0.015))


def _working(run: Run, causes: Collection[Injected], random_: random.Random) -> Run:
    return replace(run, **{random_.choice(["optimizer_s", "callback_s"]): run.compute_s * random_.uniform(0.01, 0.04)})


def _lagging(run: Run, causes: Collection[Injected], random_: random.Random) -> Run:
    return replace(run, slow_rank=random_.randrange(WORLD_SIZE), slowdown=random_.uniform(0.01, 0.04))


def _same_samples(run: Run, causes: Collection[Injected], random_: random.Random) -> Run:
    """Nobody deals samples, and reading costs nothing: a mistake, and not why steps take long."""
    is_about_data = {Injected.SLOW_STORAGE, Injected.N_FOLD_READS} & set(causes)
    return run if is_about_data or run.read_s_per_byte else replace(run, reads=Reads.SAME)


_NUISANCES: tuple[tuple[float, Callable[[Run, Collection[Injected], random.Random], Run]], ...] = (
    (0.6, _reading),
    (0.4, _rate),
    (0.35, _in_turn),
    (0.25, _saving),
    (0.4, _working),
    (0.3, _lagging),
    (0.25, _same_samples),
)
