"""What the pairs of an experiment say: loss, time and bytes of both arms, and the verdict. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_dist.errors import RecordError, unknown_option
from lightning_dist.experiment.curves import LOSS, Curve, Track, smoothed
from lightning_dist.experiment.paired import Estimate, estimate, ratio
from lightning_dist.experiment.verdict import Judgement, Margin, judge

WINDOW_SHARE = 0.1  # of a run's steps: the training loss is their mean
_WARM_UP_SHARE = 0.1  # of a run's steps are left out of its step time: they compile and fill queues
_ALIKE = 1e-3  # relative; the first loss is that of the same weights on the same samples


@dataclass(frozen=True)
class Pair:
    """Two runs that differ in the arm only.

    Attributes:
        seed: Of both.
        a: The first arm's.
        b: The second's.
        is_in_turn: Whether they were run one after the other, so that their times may be compared.
    """

    seed: int
    a: Curve
    b: Curve
    is_in_turn: bool = True


@dataclass(frozen=True)
class Quantity:
    """One figure of both arms.

    Attributes:
        name: What it is.
        unit: As :func:`lightning_dist.monitor.report.quantities.text` takes it, or ``"loss"``.
        a: Mean of the first arm's runs.
        b: Of the second's.
        change: The mean of differences (of a loss), or of ratios b / a.
        is_ratio: Which of the two.
    """

    name: str
    unit: str
    a: float
    b: float
    change: Estimate
    is_ratio: bool


@dataclass(frozen=True)
class Comparison:
    """All of it.

    Attributes:
        metric: What is judged.
        window: Steps over which the training loss is averaged; 1 for what validation logged.
        steps: At which losses are compared.
        pairs: Those that were compared.
        judgement: The verdict, on the metric at equal steps.
        quantities: The table.
        notes: What makes the pairs less comparable, a sentence each.
    """

    metric: str
    window: int
    steps: int
    pairs: tuple[Pair, ...]
    judgement: Judgement
    quantities: tuple[Quantity, ...]
    notes: tuple[str, ...]

    def tracks(self, pair: Pair) -> tuple[Track, Track]:
        """The metric of both runs, as it is compared."""
        first, second = (_track(curve, self.metric, self.window) for curve in (pair.a, pair.b))
        return first, second


def compare(pairs: Sequence[Pair], *, margin: Margin, metric: str = LOSS) -> Comparison:
    """Compare the arms.

    Args:
        pairs: At least one.
        margin: How much worse the second may be.
        metric: :data:`~lightning_dist.experiment.curves.LOSS` (of training), or what validation logged; lower is
            better.

    Raises:
        RecordError: There is no pair.
        UnknownOptionError: A run has no such metric.
    """
    if not pairs:
        raise RecordError("there is no pair of runs of which both came to their end: nothing can be compared")
    curves = [curve for pair in pairs for curve in (pair.a, pair.b)]
    known = set.intersection(*({LOSS, *curve.validations} for curve in curves))
    if metric not in known:
        raise unknown_option("--metric", metric, sorted(known))
    steps = min(curve.losses.steps[-1] for curve in curves)
    window = max(1, round(steps * WINDOW_SHARE)) if metric == LOSS else 1
    tracks = [(_track(pair.a, metric, window), _track(pair.b, metric, window)) for pair in pairs]
    first, second = ([arm.at_step(steps) for arm in arms] for arms in zip(*tracks, strict=True))
    judgement = judge(first, second, margin)
    rows = [_losses("loss at equal steps", first, second), *_in_time(tracks, steps), *_resources(pairs)]
    return Comparison(
        metric,
        window,
        steps,
        tuple(pairs),
        judgement,
        tuple(row for row in rows if row is not None),
        tuple(_notes(pairs, steps)),
    )


def _track(curve: Curve, metric: str, window: int) -> Track:
    track = curve.track(metric)
    assert track is not None, "it has been looked for"
    return smoothed(track, window)


def _losses(name: str, first: Sequence[float], second: Sequence[float]) -> Quantity | None:
    finite = [(a, b) for a, b in zip(first, second, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if not finite:
        return None
    change = estimate([b - a for a, b in finite])
    return Quantity(name, "loss", _mean(a for a, _ in finite), _mean(b for _, b in finite), change, is_ratio=False)


def _ratio(name: str, unit: str, first: Sequence[float], second: Sequence[float]) -> Quantity | None:
    change = ratio(second, first)
    return None if change is None else Quantity(name, unit, _mean(first), _mean(second), change, is_ratio=True)


def _in_time(tracks: Sequence[tuple[Track, Track]], steps: int) -> list[Quantity | None]:
    """The losses when the faster run of each pair is done, and how long each takes to a loss that both reach."""
    ends = [min(_seconds_at(a, steps), _seconds_at(b, steps)) for a, b in tracks]
    first, second = ([pair[arm].at_seconds(end) for pair, end in zip(tracks, ends, strict=True)] for arm in (0, 1))
    levels = [max(a.at_step(steps), b.at_step(steps)) for a, b in tracks]
    to_a, to_b = ([pair[arm].seconds_to(level) for pair, level in zip(tracks, levels, strict=True)] for arm in (0, 1))
    return [
        _losses("loss at equal time", first, second),
        _ratio("time to the loss that both reach", "s", to_a, to_b),
    ]


def _seconds_at(track: Track, step: int) -> float:
    return max((s for number, s in zip(track.steps, track.seconds, strict=True) if number <= step), default=math.nan)


def _resources(pairs: Sequence[Pair]) -> list[Quantity | None]:
    figures: Mapping[str, tuple[str, Callable[[Curve], float | None]]] = {
        "step, median": ("s", _step_s),
        "payload to other hosts, a step, all ranks": ("bytes", lambda curve: curve.crossed_bytes),
        "sent by all hosts' network devices, a step": ("bytes", lambda curve: curve.sent_bytes),
    }
    rows = []
    for name, (unit, value_of) in figures.items():
        values = [(value_of(pair.a), value_of(pair.b)) for pair in pairs]
        known = [(a, b) for a, b in values if a is not None and b is not None]
        rows.append(_ratio(name, unit, [a for a, _ in known], [b for _, b in known]) if known else None)
    return rows


def _step_s(curve: Curve) -> float:
    return statistics.median(curve.step_s[math.floor(len(curve.step_s) * _WARM_UP_SHARE) :])


def _notes(pairs: Sequence[Pair], steps: int) -> list[str]:
    notes = []
    others = [pair.seed for pair in pairs if not _same_batches(pair, steps)]
    if others:
        notes.append(
            f"the arms did not read the same samples in the same order (seeds {_listed(others)}): the difference is "
            "that of the data too"
        )
    starts = [
        pair.seed
        for pair in pairs
        if not math.isclose(pair.a.losses.values[0], pair.b.losses.values[0], rel_tol=_ALIKE)
    ]
    if starts and not others:
        notes.append(
            f"the arms did not begin with the same loss (seeds {_listed(starts)}): weights or dropout do not follow "
            "the seed alone"
        )
    if all(pair.a.losses.values == pair.b.losses.values for pair in pairs):
        notes.append("all losses are the same to the last bit: what differs between the arms has no effect here")
    if apart := [pair.seed for pair in pairs if not pair.is_in_turn]:
        notes.append(
            f"runs of a were taken from another experiment (seeds {_listed(apart)}): losses at equal steps do not "
            "mind, times are of other hours"
        )
    lengths = {curve.losses.steps[-1] for pair in pairs for curve in (pair.a, pair.b)}
    if len(lengths) > 1:
        notes.append(
            f"runs are {min(lengths)} to {max(lengths)} steps long, and were compared at {steps}; --steps makes them "
            "alike"
        )
    partial = [curve for pair in pairs for curve in (pair.a, pair.b) if curve.ranks < curve.world_size]
    if partial:
        notes.append(
            f"of {partial[0].world_size} ranks {partial[0].ranks} left their losses here: the others' hosts do not "
            "share the folder (--output), and do not send them (--hosts)"
        )
    sizes = {curve.world_size for pair in pairs for curve in (pair.a, pair.b)}
    if len(sizes) > 1:
        notes.append(f"runs had {min(sizes)} to {max(sizes)} ranks")
    return notes


def _same_batches(pair: Pair, steps: int) -> bool:
    """At the steps that both looked at."""
    both = [step for step in pair.a.batches if step in pair.b.batches and step <= steps]
    return all(pair.a.batches[step] == pair.b.batches[step] for step in both)


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
