"""What StepTimeline and ClusterMonitor cost: paired fits with and without them, and memory over many steps.

    python -m benchmarks.monitor
    python -m benchmarks.monitor --rounds 5 --ranks 2 --strategy hierdist

Steps of about 20 ms: multiplications of matrices in forward and backward, whose number is found first. A round fits the
same module under each arm, in an order that changes from round to round; an arm's step is the median of its steps after
the first ones, so that a process that comes between counts little; its ratio is to ``plain`` in the same round. Beside
it the processor time of the process a step, all threads together, which is what the callbacks take from it wherever
they do it. Memory: resident size of the process over one long fit. Results go to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.record import RESULTS, commit, today
from lightning_dist import ClusterMonitor, StepTimeline

WARM = 20  # steps of a fit that are not counted
WIDTH = 256
ARMS: dict[str, Callable[[Path], list[pl.Callback]]] = {
    "plain": lambda folder: [],
    "StepTimeline": lambda folder: [StepTimeline(folder)],
    "ClusterMonitor": lambda folder: [ClusterMonitor(folder)],
    "both": lambda folder: [StepTimeline(folder), ClusterMonitor(folder)],
}


class Work(pl.LightningModule):
    """Takes about as long as it is told to.

    Args:
        repeats: How often the matrices are multiplied.
    """

    def __init__(self, repeats: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))
        self._repeats = repeats
        self.register_buffer("matrix", torch.randn(WIDTH, WIDTH) / WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = self.net[1](self.net[0](batch[0]))
        for _ in range(self._repeats):
            x = x @ self.matrix
        loss = self.net[2](x).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Stopwatch(pl.Callback):
    """When each batch began, and what the process had used by then."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self.resident_bytes: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.wall_s.append(time.perf_counter())
        self.cpu_s.append(time.process_time())
        if len(self.wall_s) % 100 == 1:
            self.resident_bytes.append(resident_bytes())

    @property
    def step_s(self) -> float:
        """Median of the steps that count."""
        times = self.wall_s[WARM:]
        return statistics.median(b - a for a, b in itertools.pairwise(times))

    @property
    def cpu_step_s(self) -> float:
        """Mean over them: threads of the background work now and then."""
        times = self.cpu_s[WARM:]
        return (times[-1] - times[0]) / (len(times) - 1)


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def fit(arm: str, steps: int, repeats: int, trainer: dict[str, Any]) -> Stopwatch:
    """Some steps under one arm."""
    watch = Stopwatch()
    data = TensorDataset(torch.randn(32 * 64, 64))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl.Trainer(
            max_steps=steps + WARM,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            callbacks=[*ARMS[arm](Path(folder) / "monitor"), watch],
            **trainer,
        ).fit(Work(repeats), DataLoader(data, batch_size=32))
    return watch


def repeats_for(step_s: float, trainer: dict[str, Any]) -> int:
    """How often to multiply for a step to take so long."""
    few, many = (fit("plain", 60, repeats, trainer).step_s for repeats in (20, 120))
    return max(1, round(20 + (step_s - few) / max(1e-6, (many - few) / 100)))


def overhead(rounds: int, steps: int, repeats: int, trainer: dict[str, Any]) -> dict[str, Any]:
    """Ratios of all arms to ``plain``."""
    names = list(ARMS)
    taken: list[dict[str, Stopwatch]] = []
    for number in range(rounds):
        order = names[number % len(names) :] + names[: number % len(names)]
        taken.append({arm: fit(arm, steps, repeats, trainer) for arm in order})
    found: dict[str, Any] = {}
    for arm in names:
        wall = [each[arm].step_s / each["plain"].step_s for each in taken]
        cpu = [each[arm].cpu_step_s / each["plain"].cpu_step_s for each in taken]
        found[arm] = {
            "step_s": statistics.median(each[arm].step_s for each in taken),
            "ratio": statistics.median(wall),
            "ratios": wall,
            "cpu_ratio": statistics.median(cpu),
            "cpu_ratios": cpu,
        }
    return found


def memory(steps: int, trainer: dict[str, Any]) -> dict[str, Any]:
    """Resident size at the start, the middle and the end of a long fit with both callbacks, and of one without."""
    found = {}
    for arm in ("plain", "both"):
        sizes = fit(arm, steps, 1, trainer).resident_bytes
        found[arm] = {"after_100": sizes[1], "middle": sizes[len(sizes) // 2], "end": sizes[-1]}
    return {"steps": steps, **found}


def table(result: dict[str, Any]) -> Table:
    """As a table."""
    shown = Table(
        title=f"{result['strategy']}, {result['ranks']} rank(s), {result['rounds']} rounds of {result['steps']} steps"
    )
    for column in ("arm", "step ms", "step, of plain", "range", "processor time, of plain"):
        shown.add_column(column, justify="left" if column == "arm" else "right")
    for arm, row in result["arms"].items():
        shown.add_row(
            arm,
            f"{row['step_s'] * 1e3:.2f}",
            f"{row['ratio']:.4f}",
            f"{min(row['ratios']):.3f}-{max(row['ratios']):.3f}",
            f"{row['cpu_ratio']:.4f}",
        )
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300, help="counted steps of a fit")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--memory-steps", type=int, default=5000, help="0: not measured")
    parser.add_argument(
        "--output", type=Path, help="JSON file; default: benchmarks/results/<date>-monitor-overhead.json"
    )
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    trainer = {"devices": given.ranks, "strategy": given.strategy}
    repeats = repeats_for(given.step_ms / 1e3, trainer)
    result: dict[str, Any] = {
        "command": f"python -m benchmarks.monitor --rounds {given.rounds} --steps {given.steps} "
        f"--ranks {given.ranks} --strategy {given.strategy}",
        "commit": commit(),
        "date": today(),
        "strategy": given.strategy,
        "ranks": given.ranks,
        "rounds": given.rounds,
        "steps": given.steps,
        "arms": overhead(given.rounds, given.steps, repeats, trainer),
    }
    if given.memory_steps:
        result["memory"] = memory(given.memory_steps, trainer)
    if pl.utilities.rank_zero_only.rank != 0:
        return 0
    path = given.output or RESULTS / f"{today()}-monitor-overhead.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    console = Console()
    console.print(table(result))
    console.print(f"memory: {result.get('memory')}")
    console.print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
