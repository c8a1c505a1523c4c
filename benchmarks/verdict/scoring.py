"""Which verdict is right for which cause, and how often it was. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.verdict.runs import Injected
from lightning_dist.monitor.verdict import Cause, Finding, Reason, Verdict

HEALTHY = "healthy"
NO_VERDICT = "no verdict"

# With two hosts, both ends of a ring's edge wait alike: whether one host's link is slow or the bytes are too many for
# both is a matter of what links are expected to reach, so either reason is right for a slow link.
RIGHT: dict[Injected, tuple[Cause, tuple[Reason | None, ...]]] = {
    Injected.SLOW_STORAGE: (Cause.DATA_PIPELINE, (None,)),
    Injected.N_FOLD_READS: (Cause.IO_AMPLIFICATION, (None,)),
    Injected.SLOW_LINK: (Cause.COMMUNICATION, (Reason.SLOW_LINK, Reason.VOLUME)),
    Injected.PLACEMENT: (Cause.COMMUNICATION, (Reason.PLACEMENT,)),
    Injected.NO_OVERLAP: (Cause.COMMUNICATION, (Reason.NO_OVERLAP,)),
    Injected.SMALL_BUCKETS: (Cause.COMMUNICATION, (Reason.SMALL_BUCKETS,)),
    Injected.SLOW_RANK: (Cause.STRAGGLER, (None,)),
    Injected.CHECKPOINTS: (Cause.CHECKPOINT, (None,)),
    Injected.LOSSY_LINK: (Cause.LOSSY_LINK, (None,)),
    Injected.BUBBLE: (Cause.PIPELINE_BUBBLE, (None,)),
    Injected.HOST_WORK: (Cause.HOST_BOUND, (None,)),
}


def names(finding: Finding, cause: Injected, *, slow_rank: int | None) -> bool:
    """Whether a finding is that cause: with its reason, if it is about communication, and its rank, if about one."""
    right, reasons = RIGHT[cause]
    if finding.cause is not right:
        return False
    if right is Cause.STRAGGLER:
        return finding.ranks == (slow_rank,)
    return right is not Cause.COMMUNICATION or finding.reason in reasons


@dataclass(frozen=True)
class Judged:
    """A run that counts, and what was said of it.

    Attributes:
        seed: The case's.
        strategy: What it trained with.
        shares: Cause -> its measured share; empty: healthy.
        said: The main finding and the second, in words.
        is_right: One cause: it is the main finding. Two: they are the main finding and the costliest of the others, in
            either order. Healthy: compute is named.
        is_alarm: Something else than compute is named.
        share_error: Share of the main finding less that measured; one cause, and right.
        summary: What the main finding says, or why there is none.
    """

    seed: int
    strategy: str
    shares: dict[str, float]
    said: tuple[str, ...]
    is_right: bool
    is_alarm: bool
    share_error: float | None = None
    summary: str = ""

    @property
    def truth(self) -> str:
        """In words."""
        return " + ".join(self.shares) or HEALTHY


def judge(seed: int, strategy: str, shares: dict[str, float], slow_rank: int | None, verdict: Verdict) -> Judged:
    """Hold a verdict against the truth."""
    findings = [finding for finding in (verdict.main, *verdict.others[:1]) if finding is not None]
    causes = [Injected(name) for name in shares]
    if not causes:
        is_right = verdict.main is not None and verdict.main.cause is Cause.COMPUTE_BOUND
    elif len(causes) == 1:
        is_right = bool(findings) and names(findings[0], causes[0], slow_rank=slow_rank)
    else:
        is_right = any(
            len(findings) == 2 and all(names(f, c, slow_rank=slow_rank) for f, c in zip(findings, order, strict=True))
            for order in (causes, causes[::-1])
        )
    error = findings[0].share - shares[causes[0].value] if is_right and len(causes) == 1 else None
    return Judged(
        seed=seed,
        strategy=strategy,
        shares=shares,
        said=tuple(label(finding) for finding in findings) or (NO_VERDICT,),
        is_right=is_right,
        is_alarm=bool(findings) and findings[0].cause is not Cause.COMPUTE_BOUND,
        share_error=error,
        summary=findings[0].summary if findings else verdict.no_verdict or "",
    )


def label(finding: Finding) -> str:
    """A finding in words."""
    return finding.cause.value + (f": {finding.reason.value}" if finding.reason is not None else "")


@dataclass(frozen=True)
class Score:
    """Of a set.

    Attributes:
        runs: That count.
        right: Of them.
        alarms: Of them, in which something else than compute was named.
        interval: 95 % confidence interval of the share of right ones (Wilson).
        confusion: Truth -> what was said first -> how often.
        share_error_median: Of the absolute errors of the main finding's share, where it is right.
    """

    runs: int
    right: int
    alarms: int
    interval: tuple[float, float]
    confusion: dict[str, dict[str, int]] = field(default_factory=dict)
    share_error_median: float | None = None


def score(judged: Sequence[Judged]) -> Score:
    """Count."""
    confusion: dict[str, Counter[str]] = {}
    for each in judged:
        said = " + ".join(each.said) if len(each.shares) == 2 else each.said[0]
        confusion.setdefault(each.truth, Counter())[said] += 1
    errors = [abs(each.share_error) for each in judged if each.share_error is not None]
    right = sum(each.is_right for each in judged)
    return Score(
        runs=len(judged),
        right=right,
        alarms=sum(each.is_alarm for each in judged),
        interval=wilson(right, len(judged)),
        confusion={truth: dict(said.most_common()) for truth, said in sorted(confusion.items())},
        share_error_median=statistics.median(errors) if errors else None,
    )


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Confidence interval of a share (E. B. Wilson, 1927)."""
    if not trials:
        return 0.0, 1.0
    share, square = successes / trials, z * z / trials
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / trials + square / (4 * trials))
    return max(0.0, middle - half), min(1.0, middle + half)
