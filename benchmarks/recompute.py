"""Activation memory and step time of each kind of recomputation, beside what is predicted.

    python -m benchmarks.recompute
    python -m benchmarks.recompute --rounds 3 --batch-size 4

One process trains the example's GPT. Kept: bytes the C library has handed out after a forward less those before it
(``mallinfo2``), so that everything counts that autograd holds. Peak: the most of the same while a step runs, sampled at
the end of each layer's forward, repetitions included. Times: forward and backward, all kinds in each round, as ratios
to ``off`` in the same round. Predicted bytes: :func:`~lightning_dist.planning.activation_cost.gpt_activations`;
predicted time of ``budget`` and ``full``: what the budget's own choice says. Results go to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.record import RESULTS, commit, today
from examples.model import GPT
from lightning_dist.config import RecomputeConfig
from lightning_dist.parallel.recompute import Recomputation
from lightning_dist.planning.activation_cost import GPTShape, gpt_activations
from lightning_dist.run_config import GPTConfig

CONFIG = GPTConfig(block_size=128, n_layer=6, n_head=6, n_embd=384)


class _Heap(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


_mallinfo2 = ctypes.CDLL(None).mallinfo2
_mallinfo2.restype = _Heap


def allocated_bytes() -> int:
    """Bytes that the C library has handed out and not got back."""
    heap = _mallinfo2()
    return int(heap.uordblks + heap.hblkhd)


@dataclass(frozen=True)
class Predicted:
    """What is expected of a kind; ``None`` where nothing predicts it.

    Attributes:
        kept_bytes: After forward.
        extra_s: Seconds more a step than without recomputation.
    """

    kept_bytes: int
    extra_s: float | None


@dataclass(frozen=True)
class Measured:
    """One step.

    Attributes:
        kept_bytes: After forward.
        peak_bytes: The most while the step ran, beyond what there was before.
        step_s: Forward and backward.
    """

    kept_bytes: int
    peak_bytes: int
    step_s: float


class Subject:
    """A GPT, a batch, and the kinds of recomputation it is trained with."""

    def __init__(self, batch_size: int) -> None:
        torch.manual_seed(0)
        self.shape = GPTShape(
            batch=batch_size,
            sequence=CONFIG.block_size,
            width=CONFIG.n_embd,
            heads=CONFIG.n_head,
            vocabulary=CONFIG.vocab_size,
        )
        self._model = GPT(CONFIG)
        self._tokens = torch.randint(CONFIG.vocab_size, (batch_size, CONFIG.block_size + 1))
        self._peak_bytes = 0
        self.kinds: dict[str, RecomputeConfig] = {
            "off": RecomputeConfig(),
            "selective": RecomputeConfig(mode="selective"),
            "every_n": RecomputeConfig(mode="every_n"),
        }

    def loss(self) -> torch.Tensor:
        """Of one forward."""
        logits = self._model(self._tokens[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())

    def predict(self) -> dict[str, Predicted]:
        """For each kind; adds ``budget``, of half the blocks' activations, and ``full``, priced by the same measure."""
        cost = {kind: gpt_activations(self.shape, recompute=kind) for kind in ("off", "selective", "full")}
        layers, half = CONFIG.n_layer, CONFIG.n_layer * cost["off"].per_block // 2
        self.kinds["budget"] = RecomputeConfig(mode="budget", budget=half)
        self.kinds["full"] = RecomputeConfig(mode="full")
        chosen, everything = self._choose(half), self._choose(1024)
        outside = cost["off"].outside
        every = layers // 2 * (cost["off"].per_block + cost["full"].per_block)
        return {
            "off": Predicted(layers * cost["off"].per_block + outside, 0.0),
            "selective": Predicted(layers * cost["selective"].per_block + outside, None),
            "every_n": Predicted(every + outside, everything.extra_s / 2),
            "budget": Predicted(chosen.kept_bytes + outside, chosen.extra_s),
            "full": Predicted(layers * cost["full"].per_block + outside, everything.extra_s),
        }

    def _choose(self, budget_bytes: int) -> Any:
        recomputation = Recomputation(self._model, RecomputeConfig(mode="budget", budget=budget_bytes))
        self.loss().backward()  # warm
        recomputation.attach()
        self.loss().backward()
        choice = recomputation.settle()
        recomputation.release()
        return choice

    def measure(self, kind: str, *, memory: bool) -> Measured:
        """One step of a kind; sampling memory takes time, so that times come from steps without it."""
        recomputation = Recomputation(self._model, self.kinds[kind])
        recomputation.attach()
        if self.kinds[kind].mode == "budget":
            self.loss().backward()
            recomputation.settle()
        self._model.zero_grad(set_to_none=False)
        hooks = [m.register_forward_hook(self._sample) for m in self._model.modules() if memory and not [*m.children()]]
        before = self._peak_bytes = allocated_bytes()
        start = time.perf_counter()
        loss = self.loss()
        kept = allocated_bytes() - before
        loss.backward()
        step_s = time.perf_counter() - start
        for hook in hooks:
            hook.remove()
        recomputation.release()
        return Measured(kept, self._peak_bytes - before, step_s)

    def _sample(self, *_: object) -> None:
        self._peak_bytes = max(self._peak_bytes, allocated_bytes())


def run(batch_size: int, rounds: int) -> dict[str, Any]:
    """Measure all kinds."""
    subject = Subject(batch_size)
    predicted = subject.predict()
    memory = {kind: subject.measure(kind, memory=True) for kind in subject.kinds}
    times = [{kind: subject.measure(kind, memory=False).step_s for kind in subject.kinds} for _ in range(rounds)]
    rows = {}
    for kind in predicted:
        ratios = [taken[kind] / taken["off"] for taken in times]
        off_s = statistics.median(taken["off"] for taken in times)
        extra_s = predicted[kind].extra_s
        rows[kind] = {
            "kept_bytes": memory[kind].kept_bytes,
            "kept_predicted_bytes": predicted[kind].kept_bytes,
            "kept_relative_error": predicted[kind].kept_bytes / memory[kind].kept_bytes - 1,
            "peak_bytes": memory[kind].peak_bytes,
            "step_s": statistics.median(taken[kind] for taken in times),
            "step_ratio": statistics.median(ratios),
            "step_ratio_range": [min(ratios), max(ratios)],
            "step_ratio_predicted": None if extra_s is None else 1 + extra_s / off_s,
        }
    return {"shape": asdict(subject.shape), "layers": CONFIG.n_layer, "rounds": rounds, "kinds": rows}


def table(result: dict[str, Any]) -> Table:
    """As a table."""
    shape = result["shape"]
    shown = Table(
        title=f"GPT of {result['layers']} blocks, {shape['batch']} x {shape['sequence']} tokens, width "
        f"{shape['width']}, fp32; step times over those without recomputation, {result['rounds']} rounds"
    )
    for column in ("recompute", "kept MB", "predicted", "error", "peak MB", "step", "range", "predicted"):
        shown.add_column(column, justify="left" if column == "recompute" else "right")
    for kind, row in result["kinds"].items():
        low, high = row["step_ratio_range"]
        expected = row["step_ratio_predicted"]
        shown.add_row(
            kind,
            f"{row['kept_bytes'] / 1e6:.1f}",
            f"{row['kept_predicted_bytes'] / 1e6:.1f}",
            f"{row['kept_relative_error']:+.1%}",
            f"{row['peak_bytes'] / 1e6:.1f}",
            f"{row['step_ratio']:.2f}",
            f"{low:.2f}-{high:.2f}",
            "" if expected is None else f"{expected:.2f}",
        )
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/<date>-recompute.json")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    result = run(given.batch_size, given.rounds)
    result["command"] = f"python -m benchmarks.recompute --rounds {given.rounds} --batch-size {given.batch_size}"
    result["commit"], result["date"] = commit(), today()
    path = given.output or RESULTS / f"{today()}-recompute.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    console = Console()
    console.print(table(result))
    console.print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
