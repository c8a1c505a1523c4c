"""The comparisons: each runs its arms on two hosts of two ranks, and returns figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.compression.arms import DDP, EXACT, OURS, PERIOD, PERIODIC, RANK, THEIRS
from benchmarks.compression.figures import (
    SMOOTHED,
    bytes_a_step,
    mean_losses,
    paired,
    step_s,
    steps_to,
)
from benchmarks.compression.training import DEFAULT, SMALL, Task, Trained, train
from examples.model import GPT
from lightning_dist.run_config import GPTConfig
from tests.support.cluster import NamespaceCluster
from tests.support.failures import RanksFailed

PLACEMENT = {"a": [0, 1], "b": [2, 3]}
DEADLINE_S = 900.0
WARM_UP = 6

Say = Callable[[str], None]
Run = Callable[[str, Task], list[Trained]]


@contextmanager
def two_hosts(rate_mbit: float | None) -> Iterator[Run]:
    """Two hosts with links of that rate; what is given trains an arm on fresh ranks."""
    with NamespaceCluster(len(PLACEMENT), rate_mbit=rate_mbit) as hosts, hosts.pool(PLACEMENT) as pool:
        yield lambda arm, task: pool.run(train, args=(arm, task), deadline_s=DEADLINE_S, fresh=True)


def _last_line(error: RanksFailed) -> str:
    return str(error).strip().splitlines()[-1]


def _counted(arm: str, steps: int) -> tuple[int, int]:
    """Steps before those that are counted, and those: of a periodic arm whole periods.

    These begin in the middle of one: where weights are sharded, a rank is through before the others of its host have
    sent all.
    """
    if arm in PERIODIC:
        return PERIOD + PERIOD // 2, PERIOD * math.ceil(steps / PERIOD)
    return WARM_UP, steps


@dataclass(frozen=True)
class ByteArm:
    """An arm whose bytes are counted.

    Attributes:
        scheme: Of :data:`~benchmarks.compression.arms.OURS`.
        parallel: Its mode.
        sync: More of ``sync``.
    """

    scheme: str
    parallel: str = "ddp"
    sync: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return " ".join([self.parallel, self.scheme, *(f"sync.{name}={value}" for name, value in self.sync)])


INT8_GATHERS = (("gathers", "int8"),)
BYTE_ARMS = (
    *(ByteArm(scheme) for scheme in OURS),
    *(ByteArm(scheme, "zero2") for scheme in OURS),
    *(ByteArm(scheme, "zero2", INT8_GATHERS) for scheme in OURS if scheme not in (EXACT, "bf16", *PERIODIC)),
)


def count_bytes(arms: Sequence[ByteArm], steps: int, say: Say) -> dict[str, Any]:
    """Bytes between hosts of each arm, for the example's GPT as it comes; the link is not shaped, which changes none.

    Short sequences: gradients are as large as of long ones.
    """
    rows: dict[str, Any] = {}
    with two_hosts(None) as run:
        for arm in arms:
            after, counted = _counted(arm.scheme, steps)
            task = Task(DEFAULT, steps=after + counted, batch=1, seq_len=16, parallel=arm.parallel, sync=dict(arm.sync))
            try:
                ranks = run(arm.scheme, task)
            except RanksFailed as error:
                say(f"{arm} is left out: {_last_line(error)}")
                continue
            sent = bytes_a_step(ranks, after=after)
            exact = rows.get(f"{arm.parallel} {EXACT}", {}).get("bytes_a_host_and_step", sent)
            rows[str(arm)] = {
                "bytes_a_host_and_step": sent,
                "times_fewer": exact / sent,
                "steps_counted": counted,
            }
            say(f"{arm}: {sent / 1e6:.3f} MB a host and step, {exact / sent:.1f} x fewer")
    return {"gradients": gradients_of(DEFAULT), "arms": rows}


def gradients_of(model: GPTConfig) -> dict[str, float]:
    """Bytes of its gradients in fp32, the share that are matrices, and how many times fewer PowerSGD makes these."""
    shapes = [parameter.shape for parameter in GPT(model).parameters()]
    values = sum(shape.numel() for shape in shapes)
    matrices = [shape for shape in shapes if len(shape) == 2]
    in_matrices = sum(shape.numel() for shape in matrices)
    factors = sum(min(shape.numel(), RANK * sum(shape)) for shape in matrices)
    return {
        "bytes": 4 * values,
        "share_of_matrices": in_matrices / values,
        "matrices_times_fewer_by_powersgd": in_matrices / factors,
        "all_times_fewer_by_powersgd": values / (values - in_matrices + factors),
    }


def time_steps(
    arms: Sequence[str], rate_mbit: float | None, rounds: int, steps: int, say: Say
) -> Iterator[dict[str, Any]]:
    """Seconds and bytes of a step, the arms in turn; what is known after each round."""
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    sent: dict[str, list[float]] = {arm: [] for arm in arms}
    with two_hosts(rate_mbit) as run:
        for number in range(rounds):
            for arm in [each for each in (arms if number % 2 == 0 else reversed(arms)) if each in seconds]:
                after, counted = _counted(arm, steps)
                try:
                    ranks = run(arm, Task(steps=after + counted))
                except RanksFailed as error:
                    say(f"{arm} is left out: {_last_line(error)}")
                    del seconds[arm]
                    continue
                seconds[arm].append(step_s(ranks, after=after, period=PERIOD if arm in PERIODIC else 1))
                sent[arm].append(bytes_a_step(ranks, after=after))
                say(f"{rate_mbit or 'no'} Mbit/s, round {number + 1}/{rounds}, {arm}: {seconds[arm][-1]:.4f} s a step")
            rows = paired(seconds, arms[0])
            for arm, row in rows.items():
                row["bytes_a_host_and_step"] = statistics.median(sent[arm])
            yield {"rate_mbit": rate_mbit, "rounds": number + 1, "steps": steps, "base": arms[0], "arms": rows}


def train_whole(
    arms: Mapping[str, int], rate_mbit: float, level: float, seeds: Sequence[int], steps: int, say: Say
) -> Iterator[dict[str, Any]]:
    """Whole runs on the link: seconds from the first step's end, and steps, until the loss is reached; after each run.

    Args:
        arms: Each with its exact steps at the beginning.
        rate_mbit: Of the link.
        level: The loss, as :data:`~benchmarks.compression.figures.SMOOTHED` steps' mean.
        seeds: A run of each arm each.
        steps: Of a run.
        say: Told of each run.
    """
    rows: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    with two_hosts(rate_mbit) as run:
        for number, seed in enumerate(seeds):
            for arm in list(arms) if number % 2 == 0 else reversed(list(arms)):
                try:
                    ranks = run(arm, Task(steps=steps, planned=steps, seed=seed, exact_steps=arms[arm]))
                except RanksFailed as error:
                    say(f"{arm}, seed {seed}, is left out: {_last_line(error)}")
                    continue
                rows[arm].append({"seed": seed, **reached(ranks, level)})
                say(f"{rate_mbit} Mbit/s, {arm}: {rows[arm][-1]}")
                yield {"rate_mbit": rate_mbit, "loss": level, "steps": steps, "smoothed_steps": SMOOTHED, "arms": rows}


def reached(ranks: Sequence[Trained], level: float) -> dict[str, float | None]:
    """When a run's smoothed loss first was as low as that; ``None``: it never was."""
    losses = mean_losses(ranks)
    steps = steps_to(losses, level)
    start = max(rank.ends_s[0] for rank in ranks)
    end = None if math.isinf(steps) else max(rank.ends_s[int(steps) - 1] for rank in ranks) - start
    return {
        "seconds": end,
        "steps": None if math.isinf(steps) else steps,
        "first_loss": losses[0],
        "last_loss": statistics.fmean(losses[-SMOOTHED:]),
    }


WINDOWS = (1, 4, 16)


def time_windows(rate_mbit: float | None, rounds: int, samples: int, say: Say) -> Iterator[dict[str, Any]]:
    """One sync a micro-batch, and one for several: seconds and bytes a micro-batch, exact and in 8 bits; a round each.

    Args:
        rate_mbit: Of the link.
        rounds: Of all arms.
        samples: Micro-batches a rank that are counted.
        say: Told of each.
    """
    arms = [(scheme, window) for scheme in (EXACT, "int8") for window in WINDOWS]
    names = [f"{scheme}, sync after {window}" for scheme, window in arms]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, list[float]] = {name: [] for name in names}
    with two_hosts(rate_mbit) as run:
        for number in range(rounds):
            for name, (scheme, window) in zip(names, arms, strict=True):
                task = Task(SMALL, steps=2 + max(2, samples // window), accumulation=window)
                ranks = run(scheme, task)
                seconds[name].append(step_s(ranks, after=2) / window)
                sent[name].append(bytes_a_step(ranks, after=2) / window)
                say(f"{rate_mbit or 'no'} Mbit/s, round {number + 1}/{rounds}, {name}: {seconds[name][-1]:.4f} s")
            rows = paired(seconds, names[0])
            for name, row in rows.items():
                row["bytes_a_host_and_micro_batch"] = statistics.median(sent[name])
            yield {"rate_mbit": rate_mbit, "rounds": number + 1, "base": names[0], "batch": Task().batch, "arms": rows}


HOOKS = tuple(arm for arm in THEIRS if arm != DDP)
EVERY = (DDP, *OURS, *HOOKS)
