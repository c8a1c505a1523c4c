"""Whether two runs differ, metric by metric: significance, not only difference. Pure.

The test is Mann and Whitney's on the medians of blocks, or on the means of what comes in bursts (see
:mod:`lightning_dist.monitor.history.blocks`): "On a test of whether one of two random variables is stochastically
larger than the other", Annals of Mathematical Statistics 1947, by the normal approximation, corrected for ties and
continuity. The change and its interval are the estimate that goes with it: Hodges and Lehmann, "Estimates of location
based on rank tests", 1963. Many metrics are tested at once, so p-values are Holm's: "A simple sequentially rejective
multiple test procedure", Scandinavian Journal of Statistics 1979.

Significant means that the two runs differ, not that their configurations do: a machine has good and bad days. Where the
history has several runs of the configuration, a difference is also held against how far these lie apart.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_dist.monitor.history.blocks import average_ranks
from lightning_dist.monitor.history.series import KINDS, Better
from lightning_dist.monitor.history.summary import MetricSummary, RunSummary

LEVEL = 0.05
BLOCKS_AT_LEAST = 8  # the normal approximation is good from here on
LIKE_RUNS_AT_LEAST = 3
LIKE_RUNS_AT_MOST = 10  # of more, the largest difference says little
_Z = statistics.NormalDist()


class Change(str, enum.Enum):
    """What became of a metric from the first run to the second."""

    BETTER = "better"
    WORSE = "worse"
    CHANGED = "changed"  # and neither way is better
    SAME = "same"  # no significant difference
    USUAL = "usual"  # significant, but runs of the first one's configuration differ as much
    UNKNOWN = "unknown"  # too short to tell, or kept by an earlier release in a way that cannot be tested


@dataclass(frozen=True)
class Difference:
    """One metric in two runs.

    Attributes:
        metric: Its name.
        unit: Of ``first`` and ``second``.
        first: The metric in the first run: its median, or mean if it comes in bursts.
        second: Likewise in the second.
        change: Second over first, minus 1; ``None``: the first is 0, or it is unknown.
        low: Lower end of the 95 % interval of ``change``.
        high: Its upper end.
        p: Chance of a difference as large between two runs that are alike, for all metrics together (Holm).
        what: In one word.
        usual: The largest part by which runs like the first lie off their median; ``None``: too few.
        times_longer: How many times as long the runs should have been to tell; ``None``: unknown, or they did tell.
    """

    metric: str
    unit: str
    first: float
    second: float
    change: float | None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    what: Change = Change.UNKNOWN
    usual: float | None = None
    times_longer: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Two runs.

    Attributes:
        differences: Of each metric that both have.
        options: Those that differ: name -> both values; ``None``: not there.
        notes: What makes them less comparable: other machines, other numbers of ranks, a sentence each.
    """

    differences: tuple[Difference, ...]
    options: Mapping[str, tuple[object, object]]
    notes: tuple[str, ...]


def compare(first: RunSummary, second: RunSummary, *, history: Iterable[RunSummary] = ()) -> Comparison:
    """What is different in the second run.

    Args:
        first: The one that is compared with.
        second: The one that is judged.
        history: Other runs; those like the first, up to it, tell what is usual. Later ones may have what is looked for.
    """
    like = sorted(
        (run for run in history if run.is_like(first) and run.moment <= first.moment and run.run_id != second.run_id),
        key=lambda run: run.moment,
    )[-LIKE_RUNS_AT_MOST:]
    both = [name for name in KINDS if name in first.metrics and name in second.metrics]
    found = [_difference(name, first.metrics[name], second.metrics[name], _usual(name, like)) for name in both]
    return Comparison(
        tuple(_judged(difference) for difference in _holm(found)),
        {
            name: (first.options.get(name), second.options.get(name))
            for name in sorted({*first.options, *second.options})
            if first.options.get(name) != second.options.get(name)
        },
        tuple(_notes(first, second, both)),
    )


def mann_whitney_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Chance of samples that are as different, if both are drawn alike; two-sided."""
    m, n = len(first), len(second)
    ranks = average_ranks([*first, *second])
    u = sum(ranks[:m]) - m * (m + 1) / 2
    total = m + n
    ties = sum(ranks.count(rank) ** 3 - ranks.count(rank) for rank in set(ranks))
    variance = m * n / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance <= 0:  # all values are the same
        return 1.0
    z = max(abs(u - m * n / 2) - 0.5, 0.0) / math.sqrt(variance)
    return 2 * (1 - _Z.cdf(z))


def shift(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """How far the second lies above the first: the median of all differences, and its 95 % interval's ends."""
    m, n = len(first), len(second)
    differences = sorted(b - a for a in first for b in second)
    half_width = _Z.inv_cdf(1 - LEVEL / 2) * math.sqrt(m * n * (m + n + 1) / 12)
    outside = max(math.floor(m * n / 2 - half_width), 0)
    return statistics.median(differences), differences[outside], differences[-1 - outside]


def _difference(name: str, first: MetricSummary, second: MetricSummary, usual: float | None) -> Difference:
    kind = KINDS[name]
    a, b = (metric.mean if kind.is_bursty else metric.median for metric in (first, second))
    plain = Difference(name, kind.unit, a, b, b / a - 1 if a else None, usual=usual)
    if first.of_means != second.of_means:
        return plain
    if min(len(first.blocks), len(second.blocks)) < BLOCKS_AT_LEAST:
        return replace(plain, times_longer=_times_longer(first, second))
    p = mann_whitney_p(first.blocks, second.blocks)
    if not a:
        return replace(plain, p=p)
    middle, low, high = (value / abs(a) for value in shift(first.blocks, second.blocks))
    return replace(plain, p=p, change=plain.change if kind.is_bursty else middle, low=low, high=high)


def _times_longer(*summaries: MetricSummary) -> float | None:
    """Until each has blocks enough, if its memory is what it seems to be."""
    if any(summary.count == 0 for summary in summaries):
        return None
    return max(BLOCKS_AT_LEAST * summary.block_length / summary.count for summary in summaries)


def _holm(differences: list[Difference]) -> list[Difference]:
    tested = sorted((d for d in differences if d.p is not None), key=lambda d: d.p or 0.0)
    adjusted: dict[str, float] = {}
    largest = 0.0
    for place, difference in enumerate(tested):
        largest = max(largest, min((difference.p or 0.0) * (len(tested) - place), 1.0))
        adjusted[difference.metric] = largest
    return [replace(d, p=adjusted[d.metric]) if d.metric in adjusted else d for d in differences]


def _judged(difference: Difference) -> Difference:
    if difference.p is None:
        return difference
    if difference.p >= LEVEL:
        return replace(difference, what=Change.SAME)
    usual, change = difference.usual, difference.change
    if usual is not None and change is not None and abs(change) <= usual:
        return replace(difference, what=Change.USUAL)
    better = KINDS[difference.metric].better
    # Where both are 0, only blocks differ, and nothing says which way.
    if better is Better.NEITHER or (change is None and difference.first == difference.second):
        return replace(difference, what=Change.CHANGED)
    rose = change > 0 if change is not None else difference.second > difference.first
    return replace(difference, what=Change.BETTER if rose == (better is Better.HIGHER) else Change.WORSE)


def _usual(name: str, like: Sequence[RunSummary]) -> float | None:
    summaries = [run.metrics[name] for run in like if name in run.metrics]
    values = [summary.mean if KINDS[name].is_bursty else summary.median for summary in summaries]
    middle = statistics.median(values) if len(values) >= LIKE_RUNS_AT_LEAST else 0.0
    return max(abs(value / middle - 1) for value in values) if middle else None


def _notes(first: RunSummary, second: RunSummary, both: Sequence[str]) -> list[str]:
    notes = []
    unlike = [name for name in both if first.metrics[name].of_means != second.metrics[name].of_means]
    if unlike:
        notes.append(
            f"an earlier release kept medians of what later ones keep means of, and the two cannot be tested: "
            f"{', '.join(unlike)}; name the runs' folders, if they are still there"
        )
    if first.host_kind != second.host_kind:
        notes.append(f"other machines: {first.host_kind} and {second.host_kind}")
    if first.world_size != second.world_size:
        notes.append(f"other numbers of ranks: {first.world_size} and {second.world_size}")
    if first.commit != second.commit and first.commit and second.commit:
        notes.append(f"other commits: {first.commit[:10]} and {second.commit[:10]}")
    for name in sorted({*first.versions, *second.versions}):
        versions = first.versions.get(name), second.versions.get(name)
        if versions[0] != versions[1]:
            notes.append(f"other versions of {name}: {versions[0]} and {versions[1]}")
    return notes
