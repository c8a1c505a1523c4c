"""The parameter server: what stale look-ups and look-ups ahead save where links are slow and ranks uneven.

    python -m benchmarks.parameter_server --pairs 3
    python -m benchmarks.parameter_server --arms synchronous stale --rate 100 --uneven 0

The ids and the hosts are those of :mod:`benchmarks.sparse`; the table has 200,000 rows of 64 numbers. Each step takes
each rank ``--compute`` seconds beside its look-ups, and in turn one rank ``--uneven`` seconds more; these are waited
out and not computed, so that ranks do not share the processors for it. Arms alternate on the same hosts. Bytes are
counted by the links. Needs root and iproute2. Results go to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.ending import clean_up_when_terminated
from benchmarks.record import RESULTS, commit, today
from benchmarks.sparse import PLACEMENT, SERVED, WIDTH, StepEnds, zipf_ids
from lightning_dist import HierDistStrategy, RowWiseAdagrad
from tests.distributed.lightning_runs import loader_of, trainer_on_pool
from tests.support.cluster import NamespaceCluster
from tests.support.tasks import RankContext

NUM_ROWS = 200_000
WARMUP, STEPS = 5, 24
ARMS: dict[str, dict[str, Any]] = {
    "synchronous": {"staleness": 0, "prefetch": False},
    "synchronous, ahead": {"staleness": 0, "prefetch": True},
    "stale": {"staleness": 4, "prefetch": False},
    "stale, ahead": {"staleness": 4, "prefetch": True},
    "asynchronous, ahead": {"staleness": None, "prefetch": True},
}
"""Name -> options of ``sync.parameter_server``. Pairs that differ in one of them stand side by side."""


class Lookup(pl.LightningModule):
    """One table, some work, and every so often some more of it.

    Args:
        rank: Whose turn it is in steps ``rank``, ``rank + ranks``, ...
        compute_s: Work of each step, in seconds.
        uneven_s: More of it in this rank's turn, in seconds.
    """

    def __init__(self, rank: int, *, compute_s: float, uneven_s: float) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_ROWS, WIDTH, sparse=True)
        self._turn = rank
        self._compute_s = compute_s
        self._uneven_s = uneven_s

    def rows_of_batch(self, batch: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"table": batch}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        vectors = self.table(batch)
        is_turn = batch_idx % self.trainer.world_size == self._turn
        threading.Event().wait(self._compute_s + (self._uneven_s if is_turn else 0.0))
        return vectors.pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return RowWiseAdagrad(self.parameters(), lr=0.1)


@dataclass(frozen=True)
class Measured:
    """One rank's view of an arm.

    Attributes:
        step_s: Seconds a step, over all that count: ranks that drift apart have no common ones.
        sent_bytes: What the rank's host sent a step.
    """

    step_s: float
    sent_bytes: float


def run_arm(context: RankContext, name: str, compute_s: float, uneven_s: float) -> Measured:
    """Train a few steps on this rank."""
    torch.set_num_threads(1)
    strategy = HierDistStrategy(sync={"timeout_s": 120.0, "sparse": SERVED, "parameter_server": ARMS[name]})
    ends, module = StepEnds(), Lookup(context.rank, compute_s=compute_s, uneven_s=uneven_s)
    batches = [zipf_ids(context.rank, step, NUM_ROWS) for step in range(WARMUP + STEPS)]
    trainer_on_pool(context, strategy, callbacks=[ends]).fit(module, loader_of(batches))
    (first_s, first_bytes), (last_s, last_bytes) = ends.marks[WARMUP - 1], ends.marks[-1]
    return Measured((last_s - first_s) / STEPS, (last_bytes - first_bytes) / STEPS)


def summary(rounds: Sequence[Sequence[Measured]]) -> dict[str, float]:
    """Of some rounds of an arm: median over rounds of the slowest rank's step, and bytes of the host that sent most."""
    return {
        "step_s": statistics.median(max(rank.step_s for rank in ranks) for ranks in rounds),
        "bytes_per_host": max(rank.sent_bytes for ranks in rounds for rank in ranks),
    }


def speedups(rounds: Mapping[str, Sequence[Sequence[Measured]]], first: str) -> dict[str, list[float]]:
    """Of each arm, by round: how many times faster than the first arm in the same round."""

    def steps_s(arm: str) -> list[float]:
        return [max(rank.step_s for rank in ranks) for ranks in rounds[arm]]

    return {arm: [slow / own for slow, own in zip(steps_s(first), steps_s(arm), strict=True)] for arm in rounds}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the arms and write what they gave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--pairs", type=int, default=3, help="rounds of all arms")
    parser.add_argument("--rate", type=float, default=200, help="of each host's link, in Mbit/s")
    parser.add_argument("--compute", type=float, default=0.05, help="work of a step, in seconds")
    parser.add_argument("--uneven", type=float, default=0.2, help="more of it, of one rank in turn, in seconds")
    parser.add_argument(
        "--output", type=Path, help="JSON file; default: benchmarks/results/<date>-parameter_server.json"
    )
    given = parser.parse_args(argv)
    console, rounds = Console(), {arm: list[Sequence[Measured]]() for arm in given.arms}
    with NamespaceCluster(len(PLACEMENT), rate_mbit=given.rate) as hosts, hosts.pool(PLACEMENT) as pool:
        for number, arm in itertools.product(range(given.pairs), given.arms):
            rounds[arm].append(pool.run(run_arm, args=(arm, given.compute, given.uneven), deadline_s=300.0))
            console.print(f"round {number + 1}/{given.pairs} {arm}: {summary(rounds[arm][-1:])}")
    arms: dict[str, dict[str, Any]] = {arm: dict(summary(measured)) for arm, measured in rounds.items()}
    table = Table(title=f"2 x 2 ranks, {given.rate:g} Mbit/s, one rank in turn {given.uneven:g} s slower")
    for column in ("arm", "step s", "MB a host and step", f"times as fast as {given.arms[0]}"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm, factors in speedups(rounds, given.arms[0]).items():
        row = arms[arm]
        row["times_as_fast"] = factors
        spread = f"{statistics.median(factors):.2f} ({min(factors):.2f} to {max(factors):.2f})"
        table.add_row(arm, f"{row['step_s']:.3f}", f"{row['bytes_per_host'] / 1e6:.2f}", spread)
    console.print(table)
    path = given.output or RESULTS / f"{today()}-parameter_server.json"
    command = f"python -m benchmarks.parameter_server {' '.join(argv or [])}".strip()
    options = {name: getattr(given, name) for name in ("pairs", "rate", "compute", "uneven")}
    path.write_text(json.dumps({"command": command, "commit": commit(), "arms": arms, **options}, indent=1) + "\n")
    console.print(f"written: {path}")
    return 0


if __name__ == "__main__":
    clean_up_when_terminated()
    sys.exit(main(sys.argv[1:]))
