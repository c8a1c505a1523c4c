"""Whether the second way may replace the first: a test of non-inferiority. Pure.

The question is not whether the losses differ (with enough runs they always do), but whether the second is worse by no
more than a margin stated before: Piaggio et al., "Reporting of noninferiority and equivalence randomized trials",
JAMA 2012. Safe: the 95 % interval of the difference lies below the margin. Not safe: it lies above. Else there are not
enough runs. Each wrong answer has a chance of 2.5 % at most, for runs whose number was settled beforehand; who looks
after every few runs, and stops at the first answer, has it more often.
"""

from __future__ import annotations

import bisect
import enum
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dist.errors import ConfigError
from lightning_dist.experiment.paired import LEVEL, Estimate, estimate
from lightning_dist.experiment.student import t_cdf, t_quantile

POWER = 0.8  # with which as many runs as are advised would tell
_MOST_PAIRS = 1000


class Answer(str, enum.Enum):
    """The verdict."""

    SAFE = "safe here"
    NOT_SAFE = "not safe"
    NOT_ENOUGH = "not enough runs"


@dataclass(frozen=True)
class Margin:
    """How much worse is still acceptable.

    Attributes:
        value: Above 0.
        is_relative: Whether it is a part of the first arm's mean, or in units of the loss.
    """

    value: float
    is_relative: bool

    @staticmethod
    def parse(text: str) -> Margin:
        """What a command line says: ``1%`` of the first arm's loss, or ``0.02abs`` in units of the loss.

        Raises:
            ConfigError: It has no unit, or is not above 0.
        """
        match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(%|abs)", text.strip())
        if match is None or float(match[1]) <= 0:
            raise ConfigError(
                f"--margin {text!r} is no margin: write 1% (of the loss of arm a) or 0.02abs (in units of the loss), "
                "above 0"
            )
        return Margin(float(match[1]) / (100 if match[2] == "%" else 1), match[2] == "%")

    def of(self, mean: float) -> float:
        """In units of the loss, where the first arm's mean is this."""
        return self.value * abs(mean) if self.is_relative else self.value

    def __str__(self) -> str:
        return f"{self.value * 100:g} %" if self.is_relative else f"{self.value:g}"


@dataclass(frozen=True)
class Judgement:
    """The answer, and what it rests on.

    Attributes:
        answer: In three words.
        why: A sentence.
        margin: In units of the loss.
        difference: Second minus first, of the pairs in which both are finite; ``None``: there is no such pair.
        p_worse: Chance of a mean as low as seen, if the second were worse by the margin; ``None``: fewer than two
            pairs.
        wanted_pairs: How many would tell with a chance of 80 %, were mean and spread as seen; ``None``: they tell, or
            none would, or nothing can be said.
        lost: Pairs in which only the second loss is not finite.
    """

    answer: Answer
    why: str
    margin: float
    difference: Estimate | None = None
    p_worse: float | None = None
    wanted_pairs: int | None = None
    lost: int = 0


def judge(first: Sequence[float], second: Sequence[float], margin: Margin) -> Judgement:
    """Whether the second arm's losses are worse by no more than a margin.

    Args:
        first: A loss a pair; lower is better.
        second: Of the same pairs, in the same order.
        margin: How much worse is acceptable.
    """
    both = list(zip(first, second, strict=True))
    usable = [(a, b) for a, b in both if math.isfinite(a) and math.isfinite(b)]
    lost = sum(math.isfinite(a) and not math.isfinite(b) for a, b in both)
    allowed = margin.of(statistics.fmean(a for a, _ in usable)) if usable else math.nan
    difference = estimate([b - a for a, b in usable]) if usable else None
    if lost:
        why = f"in {lost} of {len(both)} pairs the loss of b is not finite, where that of a is"
        return Judgement(Answer.NOT_SAFE, why, allowed, difference, lost=lost)
    if difference is None or difference.t is None:
        return Judgement(Answer.NOT_ENOUGH, "it takes two pairs at least, better five", allowed, difference)
    p_worse = _p_worse(difference, allowed)
    if difference.t.high < allowed:
        why = _safe(difference, margin, allowed)
        return Judgement(Answer.SAFE, why, allowed, difference, p_worse)
    if difference.t.low > allowed:
        why = f"b is worse by {difference.t.low:.3g} at least, and {allowed:.3g} ({margin}) is allowed"
        return Judgement(Answer.NOT_SAFE, why, allowed, difference, p_worse)
    wanted = wanted_pairs(difference, allowed)
    why = (
        f"b is worse by {difference.t.low:.3g} to {difference.t.high:.3g} (95 %), and {allowed:.3g} ({margin}) is "
        "allowed"
    )
    return Judgement(Answer.NOT_ENOUGH, why, allowed, difference, p_worse, wanted)


def _safe(difference: Estimate, margin: Margin, allowed: float) -> str:
    assert difference.t is not None
    if difference.t.high < 0:
        return f"b is better by {-difference.t.high:.3g} at least"
    worse = "; still, it is worse by more than chance" if difference.t.low > 0 else ""
    return f"b is worse by {difference.t.high:.3g} at most, and {allowed:.3g} ({margin}) is allowed{worse}"


def _p_worse(difference: Estimate, allowed: float) -> float:
    assert difference.error is not None
    distance = difference.mean - allowed
    if difference.error == 0:
        return 0.0 if distance < 0 else 1.0
    return t_cdf(distance / difference.error, difference.pairs - 1)


def wanted_pairs(difference: Estimate, allowed: float) -> int | None:
    """How many pairs would put the interval on one side of the margin with a chance of 80 %.

    If the true mean and spread are those seen, that is; the power of the t test, with the distance in t's own units
    (Julious, "Sample sizes for clinical trials with normal data", Statistics in Medicine 2004). ``None``: more than
    a thousand.
    """
    distance = abs(allowed - difference.mean)
    if not difference.spread or distance == 0:
        return None
    units = distance / difference.spread
    counts = range(2, _MOST_PAIRS + 1)
    pairs = 2 + bisect.bisect_left(counts, -units, key=lambda count: -_least_distance(count))
    return None if pairs > _MOST_PAIRS else max(pairs, difference.pairs + 1)


def _least_distance(pairs: int) -> float:
    """From the margin, in spreads, that so many pairs tell; it falls with their number."""
    return (t_quantile((1 + LEVEL) / 2, pairs - 1) + t_quantile(POWER, pairs - 1)) / math.sqrt(pairs)
