"""Markdown of the verdict's benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.verdict.truth import LEAST_COMPUTE, LEAST_SHARE

TITLES = {
    "judge": "One cause",
    "judge2": "Two causes",
    "judge0": "Healthy",
    "train": "One cause, runs that rules were made with",
    "train2": "Two causes, runs that rules were made with",
    "train0": "Healthy, runs that rules were made with",
}


def markdown(document: Mapping[str, Any]) -> Iterator[str]:
    """Lines: the figures, then a confusion table a set."""
    yield "# How often the verdict names the cause"
    yield ""
    yield (
        "Each run is a Lightning training of some 40 steps by 4 ranks on 2 hosts (network namespaces of one two-core "
        "machine) with `StepTimeline` and `ClusterMonitor`. Strategy, model, batches, placement, severity and noise "
        "are drawn from a seed; compute of the model is mostly sleep, all else is real. What a cause costs is measured "
        "by running the same without it, apart from the monitor. "
        f"A run counts if each cause costs at least {LEAST_SHARE:.0%} of the step; a healthy run, if at least "
        f"{LEAST_COMPUTE:.0%} of the step is compute; the others are made up for by further seeds. Each run also has a "
        "little of other things, a few percent each. Right is: the main finding is the cause, with the reason (of "
        "communication) and the rank (of a slow one); of two causes, main and costliest second finding are the two, "
        "in either order. For a slow link, the reasons `slow_link` and `volume` are both right: with two hosts both "
        "ends wait alike. A false alarm is any cause but compute as the main finding of a healthy run. Rules were made "
        "with other seeds. The last column is the median difference of the main finding's share from that measured, "
        "in percent of the step."
    )
    yield ""
    yield f"{document['date']}, commit {document['commit']}: `{document['command']}`"
    if "note" in document:
        yield ""
        yield document["note"]
    yield ""
    yield "| set | seeds tried | runs that count | right | 95 % interval | false alarms | share, median error |"
    yield "|---|---|---|---|---|---|---|"
    for name, result in document["sets"].items():
        yield _figures(TITLES[name], result)
    for name, result in document["sets"].items():
        yield ""
        yield f"## {TITLES[name]}"
        yield ""
        yield "| put in | " + ("said, main and second" if name.endswith("2") else "said") + " | runs |"
        yield "|---|---|---|"
        for truth, said in result["score"]["confusion"].items():
            for words, number in said.items():
                yield f"| {truth} | {words} | {number} |"


def _figures(title: str, result: Mapping[str, Any]) -> str:
    scored = result["score"]
    runs, right = scored["runs"], scored["right"]
    low, high = scored["interval"]
    first, end = result["seeds"]
    alarms = f"{scored['alarms']} ({scored['alarms'] / max(1, runs):.1%})" if "ealthy" in title else ""
    error = scored["share_error_median"]
    return (
        f"| {title.lower()} | {first} to {end - 1} | {runs} | {right} ({right / max(1, runs):.1%}) "
        f"| {low:.1%} to {high:.1%} | {alarms} | {'' if error is None else f'{error:.1%}'} |"
    )
