"""Memory of each mode on real ranks, beside what the cost model predicts.

    python -m benchmarks.memory --modes ddp zero2 --ranks 2 4 --models mlp
    python -m benchmarks.memory

Measured are the distinct storages of parameters, gradients and optimizer state after a step, and the largest resident
set (``VmHWM``) of a step, from which what the process takes besides those storages before the step is subtracted.
Results go to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.ending import clean_up_when_terminated
from benchmarks.record import RESULTS, commit, today
from benchmarks.resident import MODES, SUBJECTS, Measured, measure
from lightning_dist.planning.memory_cost import RankMemory, memory_cost
from lightning_dist.planning.training import ADAMW, TrainingSetup
from lightning_dist.topology import Axes, Cluster, Layout
from tests.support.ranks import RankPool

# Flat buffers of gradients that live at a time: one where sums are as quick as backward; where they are not, the sums
# that GradientReduction lets run, and the one that is handed over.
FEWEST_BUFFERS, MOST_BUFFERS = 1, 5
PLACEMENTS: dict[int, dict[str, list[int]]] = {2: {"a": [0, 1]}, 4: {"a": [0, 1], "b": [2, 3]}}


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        mode: One of :data:`MODES`.
        model: One of :data:`SUBJECTS`.
        ranks: Number of ranks; 4 are two hosts of two, which share the machine.
        precision: Lightning's name.
        micro_batches: Of one step.
    """

    mode: str
    model: str
    ranks: int
    precision: str = "32-true"
    micro_batches: int = 1

    @property
    def name(self) -> str:
        """In results."""
        return f"{self.model}/{self.mode}/{self.ranks}/{self.precision}/{self.micro_batches}"

    @property
    def placement(self) -> dict[str, list[int]]:
        """Hosts and their ranks."""
        return PLACEMENTS[self.ranks]

    @property
    def is_possible(self) -> bool:
        """A second copy needs hosts that hold some of the ranks, and not all."""
        return self.mode != "zero3_secondary" or len(self.placement) > 1

    def setup(self, reduction_buffers: int) -> TrainingSetup:
        """For the cost model."""
        ranks_per_host = self.ranks // len(self.placement)
        shards = {"ddp": 1, "hsdp": ranks_per_host}.get(self.mode, self.ranks)
        return TrainingSetup(
            mode=MODES[self.mode]["mode"],
            axes=Axes(dp_replicate=self.ranks // shards, dp_shard=shards),
            optimizer=ADAMW,
            precision=self.precision,
            secondary_shards=ranks_per_host if self.mode == "zero3_secondary" else None,
            reduction_buffers=reduction_buffers,
            micro_batches=self.micro_batches,
        )

    def predict(self, reduction_buffers: int) -> list[RankMemory]:
        """What the model says, by rank."""
        setup, subject = self.setup(reduction_buffers), SUBJECTS[self.model]
        names = [host for rank in range(self.ranks) for host, ranks in self.placement.items() if rank in ranks]
        layout = Layout.place(Cluster(tuple(names)), setup.axes)
        inventory, activations = subject.inventory(), subject.activations(self.precision)
        return [
            memory_cost(inventory, setup, activations=activations, at=layout.coordinates(rank)).rank
            for rank in range(self.ranks)
        ]


def run_case(case: Case) -> dict[str, Any]:
    """Measure and predict; of ranks, those that need most."""
    with RankPool(placement=case.placement) as pool:
        measured: list[Measured] = pool.run(
            measure, args=(case.mode, case.model, case.precision, case.micro_batches), deadline_s=600.0, fresh=True
        )
    predicted, at_most = case.predict(FEWEST_BUFFERS), case.predict(MOST_BUFFERS)
    rest = max(rank.rest for rank in measured), max(rank.rest.total for rank in predicted)
    peak = max(rank.peak for rank in measured), max(rank.peak.total for rank in predicted)
    return {
        "case": asdict(case),
        "rest_measured_bytes": rest[0],
        "rest_predicted_bytes": rest[1],
        "rest_relative_error": rest[1] / rest[0] - 1,
        "peak_measured_bytes": peak[0],
        "peak_predicted_bytes": peak[1],
        "peak_relative_error": peak[1] / peak[0] - 1,
        "peak_at_most_bytes": max(rank.peak.total for rank in at_most),
        "ranks_measured": [asdict(rank) for rank in measured],
        "ranks_predicted": [asdict(rank) for rank in predicted],
    }


def show(results: dict[str, Any], console: Console) -> None:
    """Print what was measured and predicted."""
    table = Table(title="MB on the rank that needs most; model/mode/ranks/precision/micro-batches a step")
    table.add_column("case", no_wrap=True)
    for column in ("at rest", "model", "error", "at peak", "model", "error", "at most"):
        table.add_column(column, justify="right")
    for name, row in results.items():
        cells = []
        for moment in ("rest", "peak"):
            cells += [f"{row[f'{moment}_{kind}_bytes'] / 1e6:,.1f}" for kind in ("measured", "predicted")]
            cells.append(f"{row[f'{moment}_relative_error']:+.1%}")
        table.add_row(name, *cells, f"{row['peak_at_most_bytes'] / 1e6:,.1f}")
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases asked for and write what they gave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--models", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--ranks", nargs="+", type=int, choices=list(PLACEMENTS), default=list(PLACEMENTS))
    parser.add_argument("--precisions", nargs="+", default=["32-true"])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/<date>-memory.json")
    given = parser.parse_args(argv)
    console = Console()
    path = given.output or RESULTS / f"{today()}-memory.json"
    document = json.loads(path.read_text()) if path.exists() else {"results": {}}
    cases = [
        Case(mode, model, ranks, precision, micro_batches)
        for model in given.models
        for ranks in given.ranks
        for precision in given.precisions
        for micro_batches in given.micro_batches
        for mode in given.modes
    ]
    for case in cases:
        if not case.is_possible:
            console.print(f"left out: {case.name}: there is one host only")
            continue
        result = run_case(case)
        show({case.name: result}, console)
        result["command"] = (
            f"python -m benchmarks.memory --modes {case.mode} --models {case.model} --ranks {case.ranks} "
            f"--precisions {case.precision} --micro-batches {case.micro_batches}"
        )
        result["commit"] = commit()
        result["date"] = today()
        document["results"][case.name] = result
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1))
    show(document["results"], console)
    console.print(f"written: {path}")
    return 0


if __name__ == "__main__":
    clean_up_when_terminated()
    sys.exit(main())
