"""How each cause is put into a healthy run, so that it costs about a wanted share of the step.

Each function gives the run with its cause, and the same without: what undoing the cause would leave. Costs aimed at are
rough; what a cause costs in the end is measured.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from benchmarks.verdict.runs import BLOCKS, WORLD_SIZE, Injected, Link, Reads, Run

_OPERATION_S = 0.0012  # of a small all-reduce between four ranks on two cores
_RING, _LEGS = 1.55, 1.05  # bytes a host sends over those of the gradients: flat ring of 2 x 2 ranks, hierarchical


class Injection(NamedTuple):
    """A cause put in.

    Attributes:
        run: With it.
        undo: Takes it out of this run, or of one into which more was put; ``None``: it cannot be.
    """

    run: Run
    undo: Callable[[Run], Run] | None


def _extra_s(run: Run, share: float) -> float:
    """What has to come on top of compute to be ``share`` of both."""
    return run.compute_s * share / (1 - share)


def _wire_mbit(run: Run, wire_s: float) -> float:
    """The rate at which a host sends a step's gradients in so many seconds."""
    times = _RING if run.strategy == "ddp" else _LEGS
    return times * run.gradient_bytes * 8 / 1e6 / wire_s


def slow_storage(run: Run, share: float, random_: random.Random) -> Injection:
    seconds = _extra_s(run, share) / (run.batch_size * run.sample_bytes)
    slow = replace(run, read_s_per_byte=seconds, read_jitter=random_.uniform(0.03, 0.3))
    return Injection(slow, lambda given: replace(given, read_s_per_byte=run.read_s_per_byte))


def n_fold_reads(run: Run, share: float, random_: random.Random) -> Injection:
    """The store divides its rate among ranks: read once, the samples of a step would take a quarter of the time."""
    total_s = _extra_s(run, share) * WORLD_SIZE / (WORLD_SIZE - 1)
    reads = random_.choice([Reads.ALL, Reads.SAME])
    read_bytes = run.batch_size * run.sample_bytes * (WORLD_SIZE if reads is Reads.ALL else 1)
    slow = replace(run, reads=reads, read_s_per_byte=total_s / read_bytes, read_jitter=random_.uniform(0.03, 0.15))

    def undo(given: Run) -> Run:
        faster = WORLD_SIZE if given.reads is Reads.SAME else 1  # else fewer bytes are read
        return replace(given, reads=Reads.OWN, read_s_per_byte=given.read_s_per_byte / faster)

    return Injection(slow, undo)


def slow_link(run: Run, share: float, random_: random.Random) -> Injection:
    host = random_.choice("ab")
    hidden_s = run.compute_s if run.strategy == "zero2" else 0.6 * run.backward_s  # zero2 sends in the forward, too
    rate = _wire_mbit(run, _extra_s(run, share) + hidden_s)
    return Injection(replace(run, links={host: Link(rate)}), lambda given: replace(given, links=run.links))


def placement(run: Run, share: float, random_: random.Random) -> Injection:
    """The ring of a cyclic placement sends twice as much over each host's link."""
    del share  # set by the ratio of two, and by how much of it backward hides
    rate = _wire_mbit(run, run.compute_s * random_.uniform(0.6, 1.1))
    cyclic = replace(run, is_cyclic=True, links={"a": Link(rate), "b": Link(rate)})
    return Injection(cyclic, lambda given: replace(given, is_cyclic=False))


def no_overlap(run: Run, share: float, random_: random.Random) -> Injection:
    """As much as backward could hide nearly all of; more would be the link's fault."""
    del share
    run = replace(run, compute_s=1.4 * run.compute_s)  # of a shorter one, overhead would be the larger part
    rate = _wire_mbit(run, run.backward_s * random_.uniform(0.85, 1.0))
    buckets = run.bucket_bytes
    whole = replace(run, bucket_bytes=4 * run.gradient_bytes, links={"a": Link(rate), "b": Link(rate)})
    return Injection(whole, lambda given: replace(given, bucket_bytes=buckets))


def small_buckets(run: Run, share: float, random_: random.Random) -> Injection:
    del random_
    count = (_extra_s(run, share) + 0.7 * run.backward_s) / _OPERATION_S
    many = replace(run, layers=max(4, round(count / BLOCKS)), width=24, bucket_bytes=1024)
    return Injection(many, lambda given: replace(given, bucket_bytes=given.gradient_bytes // BLOCKS))


def slow_rank(run: Run, share: float, random_: random.Random) -> Injection:
    rank = random_.randrange(WORLD_SIZE)
    slow = replace(run, slow_rank=rank, slowdown=share / (1 - share))
    return Injection(slow, lambda given: replace(given, slow_rank=run.slow_rank, slowdown=run.slowdown))


def checkpoints(run: Run, share: float, random_: random.Random) -> Injection:
    every = random_.randint(5, 9)
    saving = replace(run, save_every=every, save_s=every * _extra_s(run, share))
    return Injection(saving, lambda given: replace(given, save_every=run.save_every, save_s=run.save_s))


def lossy_link(run: Run, share: float, random_: random.Random) -> Injection:
    host = random_.choice("ab")
    rate = _wire_mbit(run, 0.5 * run.backward_s)
    queue = random_.randint(24_000, 34_000)
    del share  # what drops cost is not for us to set
    return Injection(
        replace(run, links={host: Link(rate, queue)}), lambda given: replace(given, links={host: Link(rate)})
    )


def bubble(run: Run, share: float, random_: random.Random) -> Injection:
    del share
    return Injection(replace(run, strategy="pipeline", micro_batches=random_.choice([2, 3, 4, 5, 6])), None)


def host_work(run: Run, share: float, random_: random.Random) -> Injection:
    where = random_.choice(["optimizer_s", "callback_s"])
    working = replace(run, **{where: _extra_s(run, share)})
    return Injection(working, lambda given: replace(given, **{where: getattr(run, where)}))


INJECTIONS: dict[Injected, Callable[[Run, float, random.Random], Injection]] = {
    Injected.SLOW_STORAGE: slow_storage,
    Injected.N_FOLD_READS: n_fold_reads,
    Injected.SLOW_LINK: slow_link,
    Injected.PLACEMENT: placement,
    Injected.NO_OVERLAP: no_overlap,
    Injected.SMALL_BUCKETS: small_buckets,
    Injected.SLOW_RANK: slow_rank,
    Injected.CHECKPOINTS: checkpoints,
    Injected.LOSSY_LINK: lossy_link,
    Injected.BUBBLE: bubble,
    Injected.HOST_WORK: host_work,
}

STRATEGIES: dict[Injected, tuple[str, ...]] = {
    Injected.SLOW_STORAGE: ("ddp", "hierdist", "zero2"),
    Injected.N_FOLD_READS: ("ddp", "hierdist", "zero2"),
    Injected.SLOW_LINK: ("ddp", "hierdist", "zero2"),
    Injected.PLACEMENT: ("ddp",),  # the hierarchical legs do not mind
    Injected.NO_OVERLAP: ("ddp", "hierdist"),
    Injected.SMALL_BUCKETS: ("ddp", "hierdist"),
    Injected.SLOW_RANK: ("ddp", "hierdist", "zero2"),
    Injected.CHECKPOINTS: ("ddp", "hierdist", "zero2"),
    Injected.LOSSY_LINK: ("ddp", "hierdist"),
    Injected.BUBBLE: ("pipeline",),
    Injected.HOST_WORK: ("ddp", "hierdist", "zero2"),
}
HEALTHY_STRATEGIES = ("ddp", "hierdist", "ddp", "hierdist", "zero2")  # overhead makes few of zero2's count as healthy
