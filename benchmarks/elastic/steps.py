"""What the ranks' lines say: when a step was done again after a fault, what was lost, whether the samples are right."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Line:
    """A micro-batch of a rank; see :mod:`benchmarks.elastic.training`."""

    at_s: float
    round: int
    rank: int
    world: int
    step: int
    samples: tuple[int, ...]
    loss: float


class LineReader:
    """Lines of a run that goes on: each is read once.

    Args:
        folder: Of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "steps"
        self._read_bytes: dict[Path, int] = {}
        self._lines: list[Line] = []

    def read(self) -> list[Line]:
        """All so far, by time; what a killed process has written in part is left out."""
        for path in self._folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole) + 1
                self._lines += [_line(text) for text in whole.split(b"\n")]
        self._lines.sort(key=lambda line: line.at_s)
        return self._lines


def _line(text: bytes) -> Line:
    values = json.loads(text)
    return Line(**{**values, "samples": tuple(values["samples"])})


def read_lines(folder: Path) -> list[Line]:
    """All lines of a run so far, by time."""
    return LineReader(folder).read()


@dataclass(frozen=True)
class Recovery:
    """From a fault to the next step.

    Attributes:
        seconds: Until all ranks of the new round have done a step.
        steps_lost: Steps that were done twice.
        ranks: Of the new round.
    """

    seconds: float
    steps_lost: int
    ranks: int


def recovery(lines: Sequence[Line], *, fault_s: float, round_before: int) -> Recovery | None:
    """What followed a fault; ``None``: no step of all ranks was done yet.

    Args:
        lines: By time.
        fault_s: When it was.
        round_before: The round that it hit.
    """
    first: dict[int, dict[int, Line]] = defaultdict(dict)
    for line in lines:
        if line.round > round_before and line.at_s > fault_s:
            first[line.round].setdefault(line.rank, line)
    for by_rank in (first[number] for number in sorted(first)):
        any_line = next(iter(by_rank.values()))
        if len(by_rank) == any_line.world:
            # A step that only some had done when the fault came is not lost: it never was.
            done = Counter(line.step for line in lines if line.round == round_before and line.at_s <= fault_s)
            world = next(line.world for line in lines if line.round == round_before)
            last = max((step for step, ranks in done.items() if ranks >= world), default=0)
            lost = max(0, last - min(line.step for line in by_rank.values()) + 1)
            return Recovery(max(line.at_s for line in by_rank.values()) - fault_s, lost, any_line.world)
    return None


def newest_round(lines: Sequence[Line]) -> int:
    """Of those that have done a step; 0: none."""
    return max((line.round for line in lines), default=0)


@dataclass(frozen=True)
class Ledger:
    """What a run was trained on in the end.

    Attributes:
        steps: Step -> numbers of its samples, sorted.
        losses: Step -> mean loss over ranks and micro-batches.
        worlds: Numbers of ranks that it had.
        repeated: Samples that were taken more than once in an epoch.
    """

    steps: dict[int, tuple[int, ...]]
    losses: dict[int, float]
    worlds: frozenset[int]
    repeated: int


def ledger(lines: Sequence[Line], *, num_samples: int) -> Ledger:
    """Of each step the newest round counts: what an earlier one did of it was lost.

    Args:
        lines: Of a run that has ended.
        num_samples: Of an epoch.
    """
    newest: dict[int, int] = {}
    for line in lines:
        newest[line.step] = max(newest.get(line.step, 0), line.round)
    standing = [line for line in lines if line.round == newest[line.step]]
    samples: dict[int, list[int]] = defaultdict(list)
    losses: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for line in standing:
        samples[line.step].extend(line.samples)
        losses[line.step].append((line.rank, line.loss))
    total = Counter(number for taken in samples.values() for number in taken)
    epochs = -(-sum(total.values()) // num_samples)
    return Ledger(
        steps={step: tuple(sorted(taken)) for step, taken in sorted(samples.items())},
        losses={step: sum(loss for _, loss in sorted(each)) / len(each) for step, each in sorted(losses.items())},
        worlds=frozenset(line.world for line in standing),
        repeated=sum(count - epochs for count in total.values() if count > epochs),
    )


def same_samples(one: Ledger, other: Ledger) -> bool:
    """The samples that were trained on are those of the other run, up to the shorter one's end."""
    taken = [[number for step in each.steps.values() for number in step] for each in (one, other)]
    if one.worlds == other.worlds and len(one.worlds) == 1:
        return one.steps == other.steps
    short, long = sorted(taken, key=len)
    # Batches of another size cut the same order elsewhere; within a step it is not known, so a batch may be ahead.
    return len(set(short) - set(long)) <= max(len(step) for step in one.steps.values())
