"""The rules: which causes there are, in which order they are looked at, and from which share on they count.

The order is that of the signs a person looks at: how busy devices are and whether ranks wait for data, what share
communication has, whether heartbeats are late, whether segments are sent again. The main cause is the costliest; of two
that cost alike, the earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_dist.monitor.diagnosis.causes import (
    checkpoint,
    communication,
    data_pipeline,
    host_bound,
    io_amplification,
    lossy_link,
    pipeline_bubble,
    straggler,
)
from lightning_dist.monitor.diagnosis.claim import Claim
from lightning_dist.monitor.diagnosis.evidence import Evidence
from lightning_dist.monitor.verdict import Cause


@dataclass(frozen=True)
class Rule:
    """One cause.

    Attributes:
        cause: Which.
        claim: What it says of a run; ``None``: nothing speaks for it.
        threshold: Share of the step from which on it counts.
        because: Why not less.
    """

    cause: Cause
    claim: Callable[[Evidence], Claim | None]
    threshold: float
    because: str


RULES: tuple[Rule, ...] = (
    Rule(
        Cause.IO_AMPLIFICATION,
        io_amplification.claim,
        0.1,
        "as for the data pipeline",
    ),
    Rule(
        Cause.DATA_PIPELINE,
        data_pipeline.claim,
        0.1,
        "a loader that reads ahead makes ranks wait for the hand-over only, 1 or 2 % of a step; without it steps would "
        "be at most 1.11 times faster",
    ),
    Rule(
        Cause.COMMUNICATION,
        communication.claim,
        0.16,
        "the last bucket cannot be hidden: it costs healthy runs of small models up to an eighth of a step",
    ),
    Rule(
        Cause.STRAGGLER,
        straggler.claim,
        0.08,
        "ranks always differ by some per cent; what counts here is the excess of the same ranks, beyond noise",
    ),
    Rule(
        Cause.LOSSY_LINK,
        lossy_link.claim,
        0.16,
        "as for other communication",
    ),
    Rule(
        Cause.PIPELINE_BUBBLE,
        pipeline_bubble.claim,
        0.15,
        "four micro-batches a stage idle 16 to 20 %, which is what most schedules are run at",
    ),
    Rule(
        Cause.CHECKPOINT,
        checkpoint.claim,
        0.1,
        "at Daly's interval a save of a minute loses 3 % of a day's work, so a tenth is too often or too slow",
    ),
    Rule(
        Cause.HOST_BOUND,
        host_bound.claim,
        0.15,
        "Lightning's loops and a progress bar take one or two milliseconds, a tenth of a 20 ms step",
    ),
)

COMPUTE_SHARE = 0.5  # of the step, from which on it is what steps are spent on, if nothing else counts
