"""Turn results of :mod:`benchmarks.compression` into Markdown.

python -m benchmarks.compression.report benchmarks/results/2026-12-01-compression.json >
benchmarks/results/2026-12-01-compression.md
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compression.arms import EXACT
from benchmarks.compression.figures import seconds_to

Document = Mapping[str, Any]

ABOUT = (
    "Two hosts of two ranks are network namespaces on one two-core machine, one thread a rank. Bytes are those of the "
    "link's counter, headers included. Times are of the slowest rank: medians over rounds in which the arms ran one "
    "after another; ratios are medians of the rounds' ratios, with the smallest and the largest."
)


def markdown(document: Document) -> Iterator[str]:
    """Lines: a table a part, with command, date and commit."""
    yield "# Less over the slow link"
    yield ""
    yield ABOUT
    if "bytes" in document:
        yield from _part("Bytes between hosts, the example's GPT", document["bytes"])
        yield from bytes_table(document["bytes"])
    if "loss" in document:
        yield from _part("Loss after a fixed budget, by `hierdist ab`", document["loss"])
        yield from loss_table(document["loss"])
    for name in document:
        if name.startswith("time, "):
            yield from _part(f"A step: {name.removeprefix('time, ')}", document[name])
            yield from time_table(document[name], document.get("loss"))
        elif name.startswith("windows, "):
            yield from _part(f"One sync for several micro-batches: {name.removeprefix('windows, ')}", document[name])
            yield from window_table(document[name])
    if "whole" in document:
        yield from _part("Whole runs", document["whole"])
        yield from whole_table(document["whole"])


def _part(title: str, part: Document) -> Iterator[str]:
    yield from ("", f"## {title}", "", f"{part['date']}, commit {part['commit']}: `{part['command']}`", "")


def _table(*heads: str) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"


def bytes_table(part: Document) -> Iterator[str]:
    """A line an arm."""
    of = part["gradients"]
    yield (
        f"{of['bytes'] / 1e6:.1f} MB of fp32 gradients, {of['share_of_matrices']:.1%} of the values in matrices, which "
        f"PowerSGD of rank 4 makes {of['matrices_times_fewer_by_powersgd']:.0f} times fewer (all together "
        f"{of['all_times_fewer_by_powersgd']:.0f} times). Warm-up is not counted. With zero2, half of the bytes are "
        "parameters."
    )
    yield ""
    yield from _table("arm", "MB a host and step", "times fewer than hierarchical")
    for arm, row in part["arms"].items():
        yield f"| {arm} | {row['bytes_a_host_and_step'] / 1e6:.3f} | {row['times_fewer']:.1f} |"


def loss_table(part: Document) -> Iterator[str]:
    """A line a scheme."""
    yield (
        f"`{' '.join(part['experiment']['command'])}`, {part['experiment']['steps']} steps; losses are means of the "
        f"last {part['smoothed_steps']} steps and of all ranks. Between seeds, exact losses have a standard deviation "
        f"of {part['spread_of_exact_losses']:.4f}. The loss to be reached, {part['loss_to_reach']}, is that which the "
        f"exact runs have after half of their steps; they take {median_steps(part['exact_steps_to_loss'])} steps to it."
    )
    yield ""
    yield from _table("b", "loss of b", "b less a", "95 % (t)", "steps to the loss", "verdict, margin 1 %")
    for row in part["arms"].values():
        change, interval = row["gap"]["mean"], row["gap"]["t"]
        ends = f"{interval['low']:+.4f} to {interval['high']:+.4f}"
        percent = change / row["loss"]["a"]
        verdict = row["verdict"].partition(":")[0]
        steps = median_steps(row["steps_to_loss"])
        gap = f"{change:+.4f} ({percent:+.2%}) | {ends}"
        yield f"| `{' '.join(row['overrides'])}` | {row['loss']['b']:.4f} | {gap} | {steps} | {verdict} |"


def time_table(part: Document, loss: Document | None) -> Iterator[str]:
    """A line an arm; with the steps of ``hierdist ab``, how long it takes to the loss."""
    rows = part["arms"]
    heads = ["arm", "step, ms", f"times faster than {part['base']}", "MB a host and step"]
    if loss is not None:
        heads += [f"seconds to {loss['loss_to_reach']}", f"times sooner than {part['base']}"]
    yield from _table(*heads)
    times = {} if loss is None else times_to_loss(part, loss)
    for arm, row in rows.items():
        low, high = row["spread"]
        line = [
            *(arm, f"{row['median'] * 1e3:.0f}", f"{row['times_less']:.2f} ({low:.2f}-{high:.2f})"),
            f"{row['bytes_a_host_and_step'] / 1e6:.3f}",
        ]
        if arm in times:
            line += [f"{times[arm]:.1f}", f"{times[part['base']] / times[arm]:.2f}"]
        elif loss is not None:
            line += ["", ""]
        yield f"| {' | '.join(line)} |"


def times_to_loss(part: Document, loss: Document) -> dict[str, float]:
    """Seconds that each arm takes to the loss, median over seeds: its steps, which no link changes, times its step.

    Lightning's ddp takes the steps of the exact runs, as it computes the same. Warm-up of onebit is exact.
    """
    rows, exact = part["arms"], loss["exact_steps_to_loss"]
    exact_step = rows[EXACT]["median"] if EXACT in rows else 0.0
    times = {}
    for arm, row in rows.items():
        judged = loss["arms"].get(arm)
        if judged is None and arm not in (EXACT, part["base"]):
            continue
        steps = exact if judged is None else judged["steps_to_loss"]
        if any(each is None for each in steps):
            continue
        warm_up = _warm_up([] if judged is None else judged["overrides"])
        each = [seconds_to(n, step=row["median"], exact_steps=warm_up, exact_step=exact_step) for n in steps]
        times[arm] = statistics.median(each)
    return times


def _warm_up(overrides: Sequence[str]) -> int:
    said = [word.partition("=")[2] for word in overrides if word.startswith("sync.warmup_steps=")]
    return int(said[0]) if said else 0


def window_table(part: Document) -> Iterator[str]:
    """A line an arm."""
    yield from _table("arm", "ms a micro-batch", f"times faster than {part['base']}", "kB a host and micro-batch")
    for arm, row in part["arms"].items():
        low, high = row["spread"]
        ratio = f"{row['times_less']:.2f} ({low:.2f}-{high:.2f})"
        sent = row["bytes_a_host_and_micro_batch"] / 1e3
        yield f"| {arm} | {row['median'] * 1e3:.0f} | {ratio} | {sent:.0f} |"


def whole_table(part: Document) -> Iterator[str]:
    """A line a run."""
    yield (
        f"{part['steps']} steps at {part['rate_mbit']:g} Mbit/s, from the end of the first step until the loss, mean "
        f"of {part['smoothed_steps']} steps and all ranks, is first {part['loss']:g}."
    )
    yield ""
    yield from _table("arm", "seed", "seconds", "steps", "last loss", "times sooner")
    base = {row["seed"]: row["seconds"] for row in next(iter(part["arms"].values()))}
    for arm, rows in part["arms"].items():
        for row in rows:
            took, first = row["seconds"], base.get(row["seed"])
            sooner = f"{first / took:.2f}" if took and first else ""
            seconds = "never" if took is None else f"{took:.1f}"
            yield f"| {arm} | {row['seed']} | {seconds} | {row['steps']} | {row['last_loss']:.4f} | {sooner} |"


def median_steps(steps: Sequence[float | None]) -> str:
    """Of the seeds; or how many of them have none."""
    if any(each is None for each in steps):
        return f"not within the budget ({sum(each is None for each in steps)} of {len(steps)})"
    return f"{statistics.median(each for each in steps if each is not None):.0f}"


def main() -> int:
    """Print the Markdown of one file."""
    print("\n".join(markdown(json.loads(Path(sys.argv[1]).read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
