"""What StepTimeline and ClusterMonitor cost: paired fits with and without them, and memory over many steps.

    python -m benchmarks.monitor
    python -m benchmarks.monitor --steps 2000 --ranks 2 --strategy hierdist

Steps of about 20 ms: multiplications of matrices in forward and backward, whose number is found first.

What the training thread pays is measured inside one fit with both callbacks: a few steps in which the capture
records, then as many in which its wrappers pass calls through, and so on; each pair of neighbours gives a ratio, and
the median over all pairs is little moved by other processes. Processor time of the thread is measured likewise. Steps
are cut and told some at a time, which these medians do not see: what that takes of the training thread, a recorded
step, is measured by itself and added. What the threads in the background take is the processor time of the process
less that of the training thread, beside a fit without callbacks. Memory: resident size of the process over one long
fit. Results go to ``benchmarks/results/``.
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
from collections.abc import Sequence
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
from lightning_dist.capture.trainer_capture import TrainerCapture

WARM = 20  # steps of a fit that are not counted
WIDTH = 256
BLOCK = 5  # steps of a kind, one after another


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
        # Keeps lengths: numbers that become very small make processors slow.
        self.register_buffer("matrix", torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = self.net[1](self.net[0](batch[0]))
        for _ in range(self._repeats):
            x = x @ self.matrix
        loss = (self.net[2](x) - batch[1]).pow(2).mean()  # what cannot be learnt, so that gradients stay large
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Stopwatch(pl.Callback):
    """When each batch began, and what the training thread and the process had used by then.

    Args:
        timeline: Records in every second block of steps only; ``None``: nothing records.
        switches: Whether it does so.
    """

    def __init__(self, timeline: StepTimeline | None, *, switches: bool) -> None:
        self.wall_s: list[float] = []
        self.thread_s: list[float] = []
        self.process_s: list[float] = []
        self.resident_bytes: list[int] = []
        self.told_s = 0.0
        self.told_steps = 0
        self._timeline = timeline
        self._switches = switches

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        number = len(self.wall_s)
        self.wall_s.append(time.perf_counter())
        self.thread_s.append(time.thread_time())
        self.process_s.append(time.process_time())
        if number % 100 == 0:
            self.resident_bytes.append(resident_bytes())
        if number == 0 and self._timeline is not None and self._timeline.capture is not None:
            self._time_telling(self._timeline.capture)
        if self._switches and self._timeline is not None and self._timeline.capture is not None:
            self._timeline.capture.is_closed = number // BLOCK % 2 == 0  # its wrappers then pass calls through

    def _time_telling(self, capture: TrainerCapture) -> None:
        tell = capture._tell

        def timed(**options: bool) -> None:
            steps, start_s = len(capture._uncut), time.thread_time()
            tell(**options)
            self.told_s += time.thread_time() - start_s
            self.told_steps += steps

        capture._tell = timed  # type: ignore[method-assign]

    def blocks(self, taken: list[float]) -> list[float]:
        """Means of the blocks that count; the step in which one kind turns into the other belongs to neither."""
        times = [b - a for a, b in itertools.pairwise(taken)]
        whole = len(times) // (2 * BLOCK) * 2 * BLOCK
        return [statistics.median(times[start + 1 : start + BLOCK]) for start in range(2 * BLOCK, whole, BLOCK)]

    @property
    def blocks_of_thread(self) -> list[float]:
        """Processor time of the training thread."""
        return self.blocks(self.thread_s)

    @property
    def background_s(self) -> float:
        """Processor time of the other threads, a step."""
        others = [p - t for p, t in zip(self.process_s[WARM:], self.thread_s[WARM:], strict=True)]
        return (others[-1] - others[0]) / (len(others) - 1)


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def fit(steps: int, repeats: int, trainer: dict[str, Any], *, watched: bool, switches: bool = False) -> Stopwatch:
    """Some steps, with both callbacks or none."""
    data = TensorDataset(torch.randn(32 * 64, 64), torch.randn(32 * 64, 8))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        timeline = StepTimeline(Path(folder) / "monitor") if watched else None
        watch = Stopwatch(timeline, switches=switches)
        monitors = [timeline, ClusterMonitor(Path(folder) / "monitor")] if timeline is not None else []
        pl.Trainer(
            max_steps=steps + WARM,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            callbacks=[*monitors, watch],
            **trainer,
        ).fit(Work(repeats), DataLoader(data, batch_size=32))
    return watch


def repeats_for(step_s: float, trainer: dict[str, Any]) -> int:
    """How often to multiply for a step to take so long, of processor time, which others disturb less."""
    few, many = (statistics.median(fit(60, n, trainer, watched=False).blocks_of_thread) for n in (20, 120))
    return max(1, round(20 + (step_s - few) / max(1e-6, (many - few) / 100)))


def overhead(steps: int, repeats: int, trainer: dict[str, Any]) -> dict[str, Any]:
    """Ratios of recorded steps to their neighbours that are not."""
    watch = fit(steps, repeats, trainer, watched=True, switches=True)
    plain = fit(steps // 4, repeats, trainer, watched=False)
    told_s = watch.told_s / max(1, watch.told_steps)
    found: dict[str, Any] = {
        "told_s": told_s,
        "background_s": watch.background_s,
        "plain_background_s": plain.background_s,
    }
    for name, taken in (("wall", watch.wall_s), ("thread", watch.thread_s)):
        blocks = watch.blocks(taken)
        off, on = blocks[0::2], blocks[1::2]
        ratios = sorted(b / a for a, b in zip(off, on, strict=False))
        found[name] = {
            "off_s": statistics.median(off),
            "on_s": statistics.median(on),
            "ratio": statistics.median(ratios),
            "quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
            "pairs": len(ratios),
        }
        found[name]["all"] = found[name]["ratio"] + told_s / found[name]["off_s"]
    return found


def memory(steps: int, trainer: dict[str, Any]) -> dict[str, Any]:
    """Resident size near the start, in the middle and at the end of a long fit with both callbacks, and without."""
    found = {}
    for watched in (False, True):
        sizes = fit(steps, 1, trainer, watched=watched).resident_bytes
        found["both" if watched else "plain"] = {
            "after_100": sizes[1],
            "middle": sizes[len(sizes) // 2],
            "end": sizes[-1],
        }
    return {"steps": steps, **found}


def table(result: dict[str, Any]) -> Table:
    """As a table."""
    shown = Table(title=f"{result['strategy']}, {result['ranks']} rank(s), {result['steps']} steps")
    for column in ("time of a step", "off ms", "on ms", "ratio", "quartiles", "pairs", "with telling"):
        shown.add_column(column, justify="left" if column == "time of a step" else "right")
    for name, title in (("wall", "elapsed"), ("thread", "processor, training thread")):
        row = result["overhead"][name]
        low, high = row["quartiles"]
        shown.add_row(
            title,
            f"{row['off_s'] * 1e3:.3f}",
            f"{row['on_s'] * 1e3:.3f}",
            f"{row['ratio']:.4f}",
            f"{low:.3f}-{high:.3f}",
            str(row["pairs"]),
            f"{row['all']:.4f}",
        )
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
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
        "command": f"python -m benchmarks.monitor --steps {given.steps} --ranks {given.ranks} "
        f"--strategy {given.strategy} --step-ms {given.step_ms:g}",
        "commit": commit(),
        "date": today(),
        "strategy": given.strategy,
        "ranks": given.ranks,
        "steps": given.steps,
        "overhead": overhead(given.steps, repeats, trainer),
    }
    if given.memory_steps:
        result["memory"] = memory(given.memory_steps, trainer)
    if pl.utilities.rank_zero_only.rank != 0:
        return 0
    path = given.output or RESULTS / f"{today()}-monitor-overhead.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    console = Console()
    console.print(table(result))
    console.print(
        f"other threads, processor time a step: {result['overhead']['background_s'] * 1e3:.3f} ms, without callbacks "
        f"{result['overhead']['plain_background_s'] * 1e3:.3f} ms"
    )
    console.print(f"telling, in bursts: {result['overhead']['told_s'] * 1e3:.3f} ms a recorded step, of the thread")
    console.print(f"memory: {result.get('memory')}")
    console.print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
