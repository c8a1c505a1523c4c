"""Turn a result of :mod:`benchmarks.data` into Markdown.

python -m benchmarks.data.report benchmarks/results/2026-11-30-data.json > benchmarks/results/2026-11-30-data.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def markdown(document: dict[str, Any]) -> Iterator[str]:
    """Lines: a table a scenario, with command, date and commit."""
    yield "# Streaming of training data"
    yield ""
    yield (
        "Samples of 4 KB (1024 tokens in int32, given as int64), each library with its own format, writer, cache and "
        "shuffling; what is fetched at once has 4 MB; batches of 16 a rank, one thread a rank; hosts are network "
        "namespaces on one two-core machine, and the store is one of its own. Rates are of all ranks together, medians "
        "over rounds in which all arms ran one after another; ratios are medians of those within a round, beside them "
        "the smallest and the largest. Cold is the first epoch, with an empty cache (from disk: with nothing in the "
        "page cache), warm the second. Bytes are what the store's link sent in each epoch over the arm's data set, the "
        "largest of the rounds: headers included, which are up to 4.5 % where a shaped link cuts packets to 1500 "
        "bytes, and in parentheses the bytes of files alone. Arms with workers have two a rank."
    )
    for name, result in document["results"].items():
        yield ""
        yield f"## {name}"
        yield ""
        yield f"{result['date']}, commit {result['commit']}: `{result['command']}`"
        yield ""
        yield from _LINES.get(name, _epochs)(result)


def _epochs(result: dict[str, Any]) -> Iterator[str]:
    scenario, arms = result["scenario"], result["arms"]
    base = next(iter(arms))
    rate = "no limit" if scenario["rate_mbit"] is None else f"{scenario['rate_mbit']:g} Mbit/s"
    where = f"from a store whose link has {rate}" if scenario["stored"] else "from disk"
    size = result["num_samples"] * 4096 / 1e6
    yield f"{' + '.join(map(str, scenario['ranks']))} ranks, {size:.0f} MB of tokens, {where}."
    yield ""
    faster = f"times {base} is faster"
    yield f"| arm | cold, samples/s | {faster} | warm, samples/s | {faster} | first batch, s | sent cold | sent warm |"
    yield "|---|---|---|---|---|---|---|---|"
    for arm, row in arms.items():
        sent = [f"{e['link_over_size']:.3f} ({e['served_over_size']:.3f})" for e in row["epochs"]]
        cold, warm = (_faster(row["times_of_first"].get(key), arm == base) for key in ("cold", "warm"))
        yield (
            f"| {arm} | {row['cold_samples_per_s']:,.0f} | {cold} | {row['warm_samples_per_s']:,.0f} | {warm} | "
            f"{row['first_batch_s']:.2f} | {' | '.join(sent if scenario['stored'] else ['', ''])} |"
        )
    lost = {arm: [e["samples_lost"] for e in row["epochs"]] for arm, row in arms.items()}
    again = {arm: [e["samples_repeated"] for e in row["epochs"]] for arm, row in arms.items()}
    uneven = [arm for arm in arms if any(lost[arm]) or any(again[arm])]
    yield ""
    yield "Each arm gave each sample once an epoch" + (
        "." if not uneven else ", but for " + ", ".join(f"{a} (lost {lost[a]}, again {again[a]})" for a in uneven) + "."
    )


def _faster(spread: dict[str, float] | None, is_base: bool) -> str:
    if spread is None or is_base:
        return ""
    return f"{1 / spread['median']:.2f} ({1 / spread['high']:.2f}-{1 / spread['low']:.2f})"


def _waiting(result: dict[str, Any]) -> Iterator[str]:
    yield (
        f"The example's GPT (10.8 million parameters), 2 + 2 ranks, {result['steps']} steps, samples of 64 KB of which "
        "the model takes the first 129 tokens; the store's link has twice the rate that steps read at from disk."
    )
    yield ""
    yield "| arm | step, s | needed, MB/s | waited, of the steps' time | longest wait, s | first three batches, s |"
    yield "|---|---|---|---|---|---|"
    for arm, row in result["arms"].items():
        yield (
            f"| {arm} | {row['step_s']:.3f} | {row['needed_bytes_per_s'] / 1e6:.2f} | "
            f"{100 * row['wait_over_step']:.2f} % | {row['longest_wait_s']:.4f} | {row['first_batches_s']:.2f} |"
        )


def _startup(result: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{result['samples']:,} samples in {result['shards']:,} shards, an index of "
        f"{result['index_bytes'] / 1e6:.1f} MB on this host's disk; medians, in seconds."
    )
    yield ""
    yield "| reading the index | loader to first batch | first state | resume in the middle to first batch |"
    yield "|---|---|---|---|"
    yield (
        "| "
        + " | ".join(f"{result[key]:.3f}" for key in ("index_s", "first_batch_s", "first_state_s", "resume_s"))
        + " |"
    )


_LINES = {"waiting": _waiting, "startup": _startup}


def main() -> int:
    """Print the Markdown of one file."""
    print("\n".join(markdown(json.loads(Path(sys.argv[1]).read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
