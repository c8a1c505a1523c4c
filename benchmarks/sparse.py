"""Sparse gradients: step time and bytes of a large embedding of which a batch uses few rows.

    python -m benchmarks.sparse --pairs 3
    python -m benchmarks.sparse --arms rows ddp --rate 1000

The table has 1,000,000 rows of 64 numbers; a rank's batch looks up 4096 ids, id k with a probability of ~ 1/(k+1), as
words are. 2 hosts of 2 ranks are network namespaces with shaped links. Arms alternate on the same hosts. Needs root and
iproute2. Results go to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.arms import sent_bytes
from benchmarks.ending import clean_up_when_terminated
from benchmarks.record import RESULTS, commit, today
from lightning_dist import HierDistStrategy
from tests.distributed.lightning_runs import loader_of, trainer_on_pool
from tests.support.cluster import NamespaceCluster
from tests.support.tasks import RankContext

NUM_ROWS, WIDTH, BATCH = 1_000_000, 64, 4096
PLACEMENT = {"a": [0, 1], "b": [2, 3]}
WARMUP, STEPS = 2, 5
SERVED = {"exchange": "parameter_server"}


class Lookup(pl.LightningModule):
    """One table and a loss that costs nothing.

    Args:
        sparse: Whether its gradient is.
    """

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_ROWS, WIDTH, sparse=sparse)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.table(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class StepEnds(pl.Callback):
    """When each step ended, and what the host had sent on its link by then."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, int]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.marks.append((time.monotonic(), sent_bytes()))


@dataclass(frozen=True)
class Measured:
    """One rank's view of an arm.

    Attributes:
        step_s: Seconds of each counted step.
        sent_bytes: What the rank's host sent in each.
    """

    step_s: list[float]
    sent_bytes: list[int]


ARMS: dict[str, tuple[Callable[[], Any], bool]] = {
    "dense": (lambda: HierDistStrategy(sync={"timeout_s": 300.0}), False),
    "rows": (lambda: HierDistStrategy(sync={"timeout_s": 300.0}), True),
    "rows, flat": (lambda: HierDistStrategy(sync={"algorithm": "flat", "timeout_s": 300.0}), True),
    "parameter server": (lambda: HierDistStrategy(sync={"timeout_s": 300.0, "sparse": SERVED}), True),
    "ddp": (lambda: DDPStrategy(process_group_backend="gloo"), True),
}
"""Name -> the strategy, and whether the gradient is sparse."""


def zipf_ids(rank: int, step: int, num_rows: int = NUM_ROWS) -> torch.Tensor:
    """[BATCH]: id k with a probability of ~ 1 / (k + 1)."""
    uniform = torch.rand(BATCH, generator=torch.Generator().manual_seed(1000 * step + rank), dtype=torch.float64)
    return (torch.exp(uniform * math.log(num_rows + 1)) - 1).long()


def run_arm(context: RankContext, name: str) -> Measured:
    """Train a few steps on this rank."""
    torch.set_num_threads(1)
    make_strategy, sparse = ARMS[name]
    ends = StepEnds()
    batches = [zipf_ids(context.rank, step) for step in range(WARMUP + STEPS)]
    trainer_on_pool(context, make_strategy(), callbacks=[ends]).fit(Lookup(sparse=sparse), loader_of(batches))
    pairs = list(itertools.pairwise(ends.marks[WARMUP - 1 :]))
    return Measured([late[0] - early[0] for early, late in pairs], [late[1] - early[1] for early, late in pairs])


def summary(measured: Sequence[Sequence[Measured]]) -> dict[str, float]:
    """Of some rounds of an arm: median step of the slowest rank, and bytes of the host that sent most."""
    steps = [max(step) for ranks in measured for step in zip(*(rank.step_s for rank in ranks), strict=True)]
    sent = [statistics.mean(rank.sent_bytes) for ranks in measured for rank in ranks]
    return {"step_s": statistics.median(steps), "bytes_per_host": max(sent)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the arms and write what they gave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--pairs", type=int, default=3, help="rounds of all arms")
    parser.add_argument("--rate", type=float, default=200, help="of each host's link, in Mbit/s")
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/<date>-sparse.json")
    given = parser.parse_args(argv)
    console, rounds = Console(), {arm: list[Sequence[Measured]]() for arm in given.arms}
    with NamespaceCluster(len(PLACEMENT), rate_mbit=given.rate) as hosts, hosts.pool(PLACEMENT) as pool:
        for number, arm in itertools.product(range(given.pairs), given.arms):
            rounds[arm].append(pool.run(run_arm, args=(arm,), deadline_s=300.0, fresh=True))
            console.print(f"round {number + 1}/{given.pairs} {arm}: {summary(rounds[arm][-1:])}")
    arms = {arm: summary(measured) for arm, measured in rounds.items()}
    first = arms[given.arms[0]]
    table = Table(title=f"2 x 2 ranks, {given.rate:g} Mbit/s")
    for column in ("arm", "step s", "MB a host and step", f"x fewer bytes than {given.arms[0]}"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm, row in arms.items():
        row["times_fewer_bytes"] = first["bytes_per_host"] / row["bytes_per_host"]
        sent, times = row["bytes_per_host"], row["times_fewer_bytes"]
        table.add_row(arm, f"{row['step_s']:.3f}", f"{sent / 1e6:.2f}", f"{times:.1f}")
    console.print(table)
    path = given.output or RESULTS / f"{today()}-sparse.json"
    said = {"command": f"python -m benchmarks.sparse {' '.join(argv or [])}".strip(), "commit": commit(), "arms": arms}
    path.write_text(json.dumps({**said, "rate_mbit": given.rate, "pairs": given.pairs}, indent=1) + "\n")
    console.print(f"written: {path}")
    return 0


if __name__ == "__main__":
    clean_up_when_terminated()
    sys.exit(main(sys.argv[1:]))
