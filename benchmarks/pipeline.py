"""Pipelines: how long ranks idle, what the integration costs, what activations take, what the placement is worth.

    python -m benchmarks.pipeline
    python -m benchmarks.pipeline --parts idle overhead

Idle shares and overhead are of stages whose compute is a sleep, which takes no core: two cores cannot show the idle
time of four ranks otherwise. A stage sleeps as long in forward as for the gradients of its input and for those of its
weights. Overhead: the same stages by torch's ``PipelineStage`` and schedule in a bare loop, and by a Trainer with our
strategy, in turn; the ratio within a round. Activations: the heap's growth while a step runs, on the rank of the first
stage. Placement: hosts are network namespaces with shaped links; needs root and iproute2. Results go to
``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.arms import sent_bytes
from benchmarks.ending import clean_up_when_terminated
from benchmarks.recompute import CONFIG, allocated_bytes
from benchmarks.record import RESULTS, commit, today
from examples.model import GPT
from lightning_dist import HierDistStrategy
from lightning_dist.laws import pipeline_bubble
from tests.distributed.lightning_runs import loader_of, trainer_on_pool
from tests.support.cluster import NamespaceCluster
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

NAP_S = 0.02
IDLE_NAP_S = 0.1  # the formulas are of messages that take no time; here one takes about a millisecond
WIDTH = 8
SIZE = 4  # ranks of a pipeline
SCHEDULES = ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")


class _Nap(torch.autograd.Function):
    """Sleeps in forward, in backward, or in both."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Sleeper(nn.Module):
    """A layer that takes a while for each of forward, the gradient of its input and that of its weight."""

    def __init__(self, nap_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.nap_s = nap_s

    def forward(self, values: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not values.requires_grad:
            values = values.detach().requires_grad_()  # the first stage works as long as the others
        values = _Nap.apply(values, self.nap_s, self.nap_s)
        weight = _Nap.apply(self.weight, 0.0, self.nap_s)
        return values * weight


class Sleepers(pl.LightningModule):
    """Layers that sleep, in a row."""

    pipeline_layers = "net"

    def __init__(self, layers: int, nap_s: float) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Sleeper(nap_s) for _ in range(layers)))
        self.step_s: list[float] = []
        self.idle: Any = None
        self._last = 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).pow(2).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        now = time.monotonic()
        self.step_s.append(now - self._last)
        self._last = now

    def on_train_end(self) -> None:
        self.idle = self.trainer.strategy.pipeline_report()  # type: ignore[attr-defined]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def _strategy(**pipeline: Any) -> HierDistStrategy:
    return HierDistStrategy(parallel={"mode": "pipeline", "pipeline": pipeline}, sync={"timeout_s": 120.0})


def sleep_through(
    context: RankContext, schedule: str, micro_batches: int, steps: int, nap_s: float = NAP_S
) -> dict[str, Any]:
    """Train stages that sleep; of rank 0, seconds a step and idle shares."""
    per_rank = 1 if schedule in ("gpipe", "1f1b") else 2
    module = Sleepers(context.world_size * per_rank, nap_s / per_rank)
    strategy = _strategy(size=context.world_size, schedule=schedule, micro_batches=micro_batches)
    trainer = trainer_on_pool(context, strategy, max_steps=steps)
    trainer.fit(module, loader_of([torch.ones(micro_batches, WIDTH)] * steps))
    report = module.idle
    return {"step_s": module.step_s[2:], "idle": report.idle_share, "predicted": report.predicted}


def bare(context: RankContext, micro_batches: int, steps: int) -> dict[str, Any]:
    """The same stages by torch alone, in a bare loop."""
    rank, size = context.rank, context.world_size
    layer = Sleeper(NAP_S)
    stage = PipelineStage(layer, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=lambda output, target: output.pow(2).mean())
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    marks = [time.monotonic()]
    for _ in range(steps):
        batch, losses = torch.ones(micro_batches, WIDTH), []  # type: ignore[var-annotated]
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(batch)
        elif rank == size - 1:
            schedule.step(target=batch, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        marks.append(time.monotonic())
    return {"step_s": [late - early for early, late in itertools.pairwise(marks)]}


class Texts(pl.LightningModule):
    """The example's GPT; notes how much the heap has grown at the end of each layer's forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = GPT(CONFIG)
        self.width = width
        self.grown_bytes = 0
        self._before = 0

    def pipeline_layers(self) -> Any:
        return self.model.pipeline_layers()

    def setup(self, stage: str) -> None:
        for block in self.model.blocks:
            block.register_forward_hook(self._note)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.zero_grad()  # as the strategy is about to do
        self._before, self.grown_bytes = allocated_bytes(), 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch).flatten(0, 1), batch.flatten())

    def pipeline_input(self, batch: Tensor) -> Tensor:
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def _note(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.grown_bytes = max(self.grown_bytes, allocated_bytes() - self._before)


def keep(context: RankContext, schedule: str, micro_batches: int, recompute: str) -> int:
    """Bytes that activations take at most on this rank, in the last of three steps."""
    module = Texts(CONFIG.n_embd)
    strategy = HierDistStrategy(
        parallel={"mode": "pipeline", "pipeline": {"schedule": schedule, "micro_batches": micro_batches}},
        recompute=recompute,
        sync={"timeout_s": 120.0},
    )
    batch = torch.randint(CONFIG.vocab_size, (2 * micro_batches, CONFIG.block_size))
    trainer_on_pool(context, strategy, max_steps=3).fit(module, loader_of([batch] * 3))
    return module.grown_bytes


def place(context: RankContext, placement: str, steps: int) -> dict[str, Any]:
    """Wide activations over stages on two hosts: seconds a step, and what this rank's host sent in it."""
    width, micro_batches = 4096, 8

    class Wide(Sleepers):
        def __init__(self) -> None:
            super().__init__(context.world_size, 0.005)
            self.sent: list[int] = []
            self.net = nn.Sequential(*(nn.Sequential(nn.Linear(width, 16), nn.Linear(16, width)) for _ in range(4)))

        def on_train_batch_end(self, *_: Any) -> None:
            super().on_train_batch_end()
            self.trainer.strategy.barrier()
            self.sent.append(sent_bytes())

    module = Wide()
    strategy = _strategy(size=context.world_size, micro_batches=micro_batches, placement=placement)
    trainer = trainer_on_pool(context, strategy, max_steps=steps)
    trainer.fit(module, loader_of([torch.ones(micro_batches * 8, width)] * steps))
    sent = [late - early for early, late in zip(module.sent, module.sent[1:], strict=False)]
    return {"step_s": module.step_s[2:], "sent_bytes": sent[1:], "host": context.host}


# -- parts ------------------------------------------------------------------------------------------------------------


def run_idle(console: Console, rounds: int) -> dict[str, Any]:
    """Idle shares beside the formulas."""
    rows: dict[str, Any] = {}
    cases = [(name, count) for name in ("gpipe", "1f1b") for count in (4, 8, 16, 28)]
    cases += [(name, 8) for name in SCHEDULES]
    with RankPool(placement={"a": list(range(SIZE))}) as pool:
        for name, count in cases:
            said = pool.run(sleep_through, args=(name, count, 3 + rounds, IDLE_NAP_S), deadline_s=300.0, fresh=True)[0]
            virtual = 1 if name in ("gpipe", "1f1b") else 2
            formula = pipeline_bubble(SIZE, count, virtual_stages=virtual)
            rows[f"{name}/{count}"] = {
                "idle_share": said["idle"],
                "formula": formula,
                "relative_error": said["idle"] / formula - 1,
                "predicted_from_order": said["predicted"],
                "step_s": statistics.median(said["step_s"]),
            }
            console.print(f"  {name} M={count}: idle {said['idle']:.1%}, formula {formula:.1%}")
    return rows


def run_overhead(console: Console, rounds: int) -> dict[str, Any]:
    """Our step over that of torch's bare schedule, in turn."""
    ratios, ours, theirs = [], [], []
    with RankPool(placement={"a": list(range(SIZE))}) as pool:
        for number in range(rounds):
            first = pool.run(bare, args=(8, 12), deadline_s=300.0, fresh=True)[0]
            second = pool.run(sleep_through, args=("1f1b", 8, 12), deadline_s=300.0, fresh=True)[0]
            theirs.append(statistics.median(first["step_s"]))
            ours.append(statistics.median(second["step_s"]))
            ratios.append(ours[-1] / theirs[-1])
            console.print(f"  round {number + 1}: torch {theirs[-1]:.4f} s, hierdist {ours[-1]:.4f} s a step")
    return {
        "torch_step_s": statistics.median(theirs),
        "hierdist_step_s": statistics.median(ours),
        "ratio": statistics.median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
    }


def run_memory(console: Console, rounds: int) -> dict[str, Any]:
    """Bytes of activations on the rank of the first stage."""
    rows: dict[str, Any] = {}
    with RankPool(placement={"a": [0, 1]}) as pool:
        for schedule in ("gpipe", "1f1b"):
            for recompute in ("off", "full"):
                for count in (4, 8, 16):
                    kept = pool.run(keep, args=(schedule, count, recompute), deadline_s=300.0, fresh=True)[0]
                    rows[f"{schedule}/{recompute}/{count}"] = kept
                    console.print(f"  {schedule}, recompute={recompute}, M={count}: {kept / 1e6:.1f} MB")
    return rows


def run_placement(console: Console, rounds: int) -> dict[str, Any]:
    """A pipeline of four on hosts whose ranks are numbered in turn: placed well, and in the order of the numbers."""
    found: dict[str, list[dict[str, Any]]] = {"auto": [], "rank_order": []}
    with (
        NamespaceCluster(2, rate_mbit=200) as hosts,
        hosts.pool({"a": [0, 2], "b": [1, 3]}) as pool,
    ):
        for _ in range(rounds):
            for placement, runs in found.items():
                ranks = pool.run(place, args=(placement, 6), deadline_s=300.0, fresh=True)
                sent = sum(statistics.median(ranks[r]["sent_bytes"]) for r in (0, 1))
                runs.append({"step_s": statistics.median(ranks[0]["step_s"]), "sent_bytes": sent})
                console.print(f"  {placement}: {runs[-1]['step_s']:.3f} s, {sent / 1e6:.2f} MB between hosts a step")
    pairs = list(zip(*found.values(), strict=True))
    times = [bad["step_s"] / good["step_s"] for good, bad in pairs]
    return {
        **{name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()},
        "times_faster": statistics.median(times),
        "spread": [min(times), max(times)],
        "times_fewer_bytes": statistics.median(bad["sent_bytes"] / good["sent_bytes"] for good, bad in pairs),
    }


PARTS: dict[str, Callable[[Console, int], dict[str, Any]]] = {
    "idle": run_idle,
    "overhead": run_overhead,
    "memory": run_memory,
    "placement": run_placement,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts asked for and write what they gave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/<date>-pipeline.json")
    given = parser.parse_args(argv)
    console = Console()
    path = given.output or RESULTS / f"{today()}-pipeline.json"
    document = json.loads(path.read_text()) if path.exists() else {"results": {}}
    for part in given.parts:
        console.print(part)
        document["results"][part] = {
            "command": f"python -m benchmarks.pipeline --parts {part} --rounds {given.rounds}",
            "commit": commit(),
            "date": today(),
            "rows": PARTS[part](console, given.rounds),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1))
    _show(document["results"], console)
    console.print(f"written: {path}")
    return 0


def _show(results: dict[str, Any], console: Console) -> None:
    rows = results.get("idle", {}).get("rows", {})
    table = Table(title=f"idle share, {SIZE} ranks whose compute is a sleep")
    for column in ("schedule/micro-batches", "measured", "formula", "relative error", "order's own"):
        table.add_column(column, justify="left" if column.startswith("schedule") else "right")
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['idle_share']:.1%}",
            f"{row['formula']:.1%}",
            f"{row['relative_error']:+.1%}",
            f"{row['predicted_from_order']:.1%}",
        )
    if rows:
        console.print(table)


if __name__ == "__main__":
    clean_up_when_terminated()
    sys.exit(main())
