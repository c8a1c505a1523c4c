"""Turn a result of :mod:`benchmarks.elastic` into Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_NAMES = {
    "rank_killed": "a rank killed",
    "host_killed": "a host's processes killed",
    "host_silent": "a host silent",
    "store_host_killed": "the leader's host killed",
    "store_host_silent": "the leader's host silent",
}


def markdown(document: dict[str, Any]) -> Iterator[str]:
    """Lines: a section a part, with date and commit."""
    yield "# Failures: how fast a run goes on, what it loses, and what it costs"
    yield ""
    yield (
        "The GPT of the example (4 layers, width 128), 8 samples of 64 tokens a rank; hosts are network namespaces on "
        "one two-core machine. A fault is over when all ranks of the next round have done a step. Ours: snapshots in "
        "memory and on a buddy every 5 steps, a fence. torchrun: the same script, checkpoints every 5 steps on a local "
        "disk. The leader's host is that of the c10d store with torchrun. Steps lost are those done twice. Phases are "
        "medians of what the incidents say; the first is counted from the fault's first sign."
    )
    results = document["results"]
    recoveries = {name: each for name, each in results.items() if name.startswith("recovery:")}
    if recoveries:
        yield from _recoveries(recoveries)
    for name in ("faults", "alarms", "overhead", "goodput"):
        if name in results:
            yield from _part(name, results[name])


def _recoveries(results: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield "## From a fault to the next step"
    yield ""
    columns = ("shape", "model", "fault", "launched by", "p50, s", "p99, s", "most steps lost", "never", "of")
    yield _row(*columns, "phases, s", "date, commit")
    yield _row(*["---"] * (len(columns) + 2))
    for name, each in sorted(results.items()):
        _, shape, fault, arm, parallel = name.split(":")
        numbers = [f"{each[key]:.1f}" if key in each else "-" for key in ("p50_s", "p99_s")]
        lost = each.get("most_steps_lost", "-")
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in each.get("phases", {}).items())
        counts = (lost, each["never"], each["trials"])
        made = f"{each['date']}, {each['commit']}"
        yield _row(shape, parallel, _NAMES[fault], arm, *numbers, *counts, phases, made)


def _row(*cells: object) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _part(name: str, each: dict[str, Any]) -> Iterator[str]:
    titles = {
        "faults": "Random faults", "alarms": "False alarms", "overhead": "What it costs without faults",
        "goodput": "Goodput",
    }  # fmt: skip
    yield ""
    yield f"## {titles[name]}"
    yield ""
    yield f"{each['date']}, commit {each['commit']}: `{each['command']}`"
    yield ""
    if name == "faults":
        yield from _faults(each)
    elif name == "alarms":
        yield f"{each['steps']} steps: {each['rounds']} round, {len(each['incidents'])} incidents."
    elif name == "overhead":
        yield f"{_change(each, '')} of a step's time; a step without: {each['step_s']['plain'] * 1000:.1f} ms."
        if "pairs" in each:
            yield f"Of processor time: {_change(each, 'cpu_')}. Medians of {each['pairs']} pairs of neighbouring turns"
            yield "of two runs, and where these medians are 19 times out of 20. Without: torchrun, no snapshots."
    else:
        yield f"{100 * each['goodput']:.1f}% with {each['faults']} ranks killed in {each['wall_s']:.0f} s."


def _faults(each: dict[str, Any]) -> Iterator[str]:
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(each["verdicts"].items()))
    kinds = ", ".join(f"{kind} {count}" for kind, count in each["kinds"].items())
    yield f"{each['faults']} faults in {each['runs']} runs on two hosts of two ranks: {verdicts}."
    yield ""
    yield "Each is held against a run without faults. Same: of each step the samples and, to the last bit, the loss."
    yield "Same samples: it was smaller for a while, so sums were taken in another order, and the last loss is the same"
    yield "within 0.001. The others are not right: with other samples or another loss, a code that is not 0, or hung."
    yield ""
    yield f"Kinds: {kinds}."
    yield ""
    yield f"Largest difference of the last loss in a run that was right: {each['largest_loss_difference']:.3g}."
    if each["failed"]:
        still = ", ".join(map(str, each["not_fine"])) or "none"
        yield f"Not right were seeds {', '.join(each['failed'])}; in their newest run still: {still}."
    yield f"Commits: {', '.join(each['commits'])}."


def _change(each: dict[str, Any], prefix: str) -> str:
    low, high = each[f"{prefix}spread"]
    return f"{100 * (each[f'{prefix}median_ratio'] - 1):+.1f}% ({100 * (low - 1):+.1f} to {100 * (high - 1):+.1f}%)"
