"""What a diagnosis says, as values."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Cause(str, enum.Enum):
    """Why steps take as long as they do."""

    DATA_PIPELINE = "data_pipeline"  # ranks wait for batches
    IO_AMPLIFICATION = "io_amplification"  # each rank reads all data
    COMMUNICATION = "communication"  # exposed; the finding's reason says what is behind it
    LOSSY_LINK = "lossy_link"  # segments are sent again
    STRAGGLER = "straggler"  # one rank is slower, and the others wait for it
    PIPELINE_BUBBLE = "pipeline_bubble"
    CHECKPOINT = "checkpoint"  # training stands still for checkpoints
    HOST_BOUND = "host_bound"  # the optimizer, callbacks, logging or Lightning's loops
    COMPUTE_BOUND = "compute_bound"  # good


class Reason(str, enum.Enum):
    """What is behind exposed communication."""

    PLACEMENT = "placement"  # neighbours in the ring sit on different hosts
    NO_OVERLAP = "no_overlap"  # nothing is sent while backward computes
    SMALL_BUCKETS = "small_buckets"  # latency, not bandwidth
    SLOW_LINK = "slow_link"  # a link carries less than before, or far less than its nominal rate
    VOLUME = "volume"  # more bytes than can be exchanged in the time of a step


@dataclass(frozen=True)
class Finding:
    """One cause.

    Attributes:
        cause: Which.
        share: Of the step's time that it costs, between 0 and 1.
        confidence: Between 0 and 1.
        summary: One sentence with the figures.
        evidence: What was seen, a sentence each.
        advice: What to change, by the option's name, a sentence each.
        speedup_at_most: By Amdahl's law, how many times faster steps are at most without it; for
            :attr:`Cause.COMPUTE_BOUND` without all the rest.
        reason: Behind :attr:`Cause.COMMUNICATION`.
        ranks: Whom it concerns; empty: all.
        since_step: First step that shows it; ``None``: from the start.
    """

    cause: Cause
    share: float
    confidence: float
    summary: str
    evidence: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    speedup_at_most: float = 1.0
    reason: Reason | None = None
    ranks: tuple[int, ...] = ()
    since_step: int | None = None


@dataclass(frozen=True)
class Verdict:
    """The main cause, the others, or why there is none.

    Attributes:
        main: ``None``: no verdict.
        others: Second causes, the costliest first.
        no_verdict: Why not, when ``main`` is ``None``.
        steps: How many were judged.
        step_s: Median step, in seconds.
        missing: What could not be looked at, and why.
    """

    main: Finding | None
    others: tuple[Finding, ...] = ()
    no_verdict: str | None = None
    steps: int = 0
    step_s: float | None = None
    missing: tuple[str, ...] = ()
