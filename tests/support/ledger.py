"""What ranks have trained on, as ``tests/faults/scripts/elastic_example.py`` writes it down, and which of it stands."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORD_BYTES = 16


@dataclass(frozen=True)
class Step:
    """An optimizer step, in the last round that did it.

    Attributes:
        ranks: So many did it.
        seats: How many ranks the host of each rank has: which of uneven hosts comes first is chance.
        samples: Of all ranks, in the order of their names; those that read the same count once.
        losses: Of each rank and micro-batch, as far as the rank lived to write it.
        rate: The learning rate after it.
    """

    ranks: int
    seats: tuple[int, ...]
    samples: tuple[str, ...]
    losses: dict[int, tuple[float, ...]]
    rate: float | None


def write_text(path: Path, samples: int) -> Path:
    """Text that tells, in each window of :data:`RECORD_BYTES` bytes, which window it is."""
    path.write_text("".join(f"{number:0{RECORD_BYTES - 1}d}\n" for number in range(samples)) + "\n")
    return path


def read_steps(folder: Path, *, readers: int = 1) -> dict[int, Step]:
    """The steps that stand, by number.

    Args:
        folder: Where ranks wrote.
        readers: So many ranks read the same samples.
    """
    lines: dict[int, list[dict[str, Any]]] = {}
    for path in folder.glob("ledger-*.jsonl"):
        for text in path.read_text().splitlines(keepends=True):
            if text.endswith("\n"):  # else its rank was killed
                line = json.loads(text)
                lines.setdefault(line["step"], []).append(line)
    return {step: _step(found, readers) for step, found in sorted(lines.items())}


def _step(lines: Iterable[dict[str, Any]], readers: int) -> Step:
    newest = max(line["round"] for line in lines)
    last = [line for line in lines if line["round"] == newest]
    samples = sorted(sample for line in last for sample in line.get("samples", ()))
    losses = {rank: tuple(line["loss"] for line in last if "loss" in line and line["rank"] == rank)
              for rank in sorted({line["rank"] for line in last})}  # fmt: skip
    rates = [line["rate"] for line in last if "rate" in line]
    seats = {line["rank"]: line["of_host"] for line in last}
    return Step(
        last[0]["ranks"],
        tuple(seats[rank] for rank in sorted(seats)),
        tuple(samples[::readers]),
        losses,
        rates[-1] if rates else None,
    )


def check_epochs(steps: dict[int, Step], samples: int) -> int:
    """Each sample is there once in each whole epoch, and at most once in the last; how many whole ones there were."""
    assert list(steps) == list(range(len(steps))), "steps are missing"
    sizes = Counter(len(step.samples) for step in steps.values())
    usual = sizes.most_common(1)[0][0]
    others = {number: (len(step.samples), step.ranks) for number, step in steps.items() if len(step.samples) != usual}
    assert not others, f"steps have {usual} samples each, but for these (samples, ranks): {others}"
    names = [sample for step in steps.values() for sample in step.samples]
    for first in range(0, len(names), samples):
        counted = Counter(names[first : first + samples])
        assert set(counted.values()) == {1}, {name: count for name, count in counted.items() if count > 1}
    return len(names) // samples
