"""From a record to a verdict: pure.

Note: confidence.
    A finding's confidence is the product of two figures. The first is how directly what was seen shows this cause and
    no other (each rule's ``directness``: a measured wait 0.95, a conclusion from bytes and rates 0.7 to 0.85). The
    second is how likely its share is truly above the rule's threshold, given how the share varies between blocks of
    steps (``noise.block_error``); what is rare, as checkpoints, is a sum and has no such error. Steps that are mostly
    compute have the chance that no other cause is truly above its threshold.

Note: second causes.
    They are judged as if costlier ones were gone, since that is when they will matter: of what these leave of the step,
    a second cause must cost as much as its threshold says. The share it is given is of the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lightning_dist.laws import amdahl_limit
from lightning_dist.monitor.diagnosis.causes import compute_bound
from lightning_dist.monitor.diagnosis.changes import without_shift
from lightning_dist.monitor.diagnosis.claim import Claim
from lightning_dist.monitor.diagnosis.evidence import Evidence
from lightning_dist.monitor.diagnosis.noise import block_error, chance_above
from lightning_dist.monitor.diagnosis.rules import COMPUTE_SHARE, RULES, Rule
from lightning_dist.monitor.diagnosis.window import NoWindow, Window, window_of
from lightning_dist.monitor.diagnosis.wording import percent
from lightning_dist.monitor.record import Phase, RunRecord
from lightning_dist.monitor.verdict import Cause, Finding, Verdict

LEAST_CONFIDENCE = 0.5  # of "compute bound": below, steps are too noisy to say that nothing else counts
WORTH_A_WORD = 0.03  # of the step: less is hardly worth the work of a change
LEAST_REST = 0.01  # of the step: what costlier causes leave; of less nothing is told
LEAST_ERROR = 0.005  # of a share; clocks and the edges of phases are no better


def diagnose(record: RunRecord) -> Verdict:
    """Name the main cause why steps take as long as they do, and second ones; or say why there is no verdict."""
    window = window_of(record)
    if isinstance(window, NoWindow):
        return Verdict(None, no_verdict=window.reason, steps=window.steps, missing=window.missing)
    evidence = Evidence(record, window)
    weighed = [(rule, claim) for rule in RULES if (claim := rule.claim(evidence)) is not None]
    findings = _findings(window, weighed)
    main, no_verdict = (findings[0], None) if findings else _without_cause(evidence, weighed)
    return Verdict(
        main,
        others=tuple(findings[1:]),
        no_verdict=no_verdict,
        steps=len(window.steps),
        step_s=float(np.median(window.step_s)),
        missing=(*window.missing, *_unsampled(evidence)),
    )


def _findings(window: Window, weighed: Sequence[tuple[Rule, Claim]]) -> list[Finding]:
    """The claims that count, the costliest first. See Note: second causes."""
    found: list[Finding] = []
    rest = 1.0
    for rule, claim in sorted(weighed, key=lambda each: -window.share(each[1].cost_s)):
        share = window.share(claim.cost_s)
        if rest > LEAST_REST and share / rest >= _threshold(rule, claim):
            found.append(_finding(window, rule, claim, rest=rest))
            rest -= share
    return found


def _finding(window: Window, rule: Rule, claim: Claim, *, rest: float) -> Finding:
    """A claim that counts in the ``rest`` of the step that costlier ones leave."""
    share = window.share(claim.cost_s)
    error = _error(window, claim) / rest
    chance = 1.0 if claim.is_rare else chance_above(share / rest, _threshold(rule, claim), error)
    return Finding(
        cause=rule.cause,
        share=share,
        confidence=claim.directness * chance,
        summary=_summary(claim.what, share),
        evidence=claim.evidence,
        advice=claim.advice,
        speedup_at_most=amdahl_limit(share),
        reason=claim.reason,
        ranks=claim.ranks,
        since_step=claim.since_step,
    )


def _without_cause(evidence: Evidence, weighed: Sequence[tuple[Rule, Claim]]) -> tuple[Finding | None, str | None]:
    """Compute, if it is most of the step and nothing else may well count; else why there is no verdict."""
    window = evidence.window
    unmeasured = _unmeasured(evidence)
    if unmeasured:
        return None, f"what was measured costs little, and {unmeasured} could not be measured"
    claim = compute_bound.claim(evidence)
    share = window.share(claim.cost_s)
    if share < COMPUTE_SHARE:
        parts = sorted(((window.share(each.cost_s), rule.cause) for rule, each in weighed), reverse=True)[:3]
        spread = ", ".join(f"{cause.value.replace('_', ' ')} {percent(part)}" for part, cause in parts)
        return None, f"no cause stands out: compute {percent(share)}, {spread}"
    chances = {
        rule.cause: 0.0
        if each.is_rare
        else chance_above(window.share(each.cost_s), _threshold(rule, each), _error(window, each))
        for rule, each in weighed
    }
    clear = math.prod(1 - chance for chance in chances.values())
    if clear < LEAST_CONFIDENCE:
        cause = max(chances, key=lambda each: chances[each])
        rule, noisy = next((rule, each) for rule, each in weighed if rule.cause is cause)
        part, error = window.share(noisy.cost_s), _error(window, noisy)
        return None, (
            f"steps are too noisy: {cause.value.replace('_', ' ')} costs {percent(part)} with an error of "
            f"{percent(error)}, and counts from {percent(_threshold(rule, noisy))} on; more steps would tell"
        )
    return (
        Finding(
            cause=Cause.COMPUTE_BOUND,
            share=share,
            confidence=claim.directness * clear,
            summary=_summary(claim.what, share),
            evidence=(*claim.evidence, *_besides(window, weighed)),
            advice=claim.advice,
            # Of all that is not compute: nothing is to be gained by doing without compute.
            speedup_at_most=amdahl_limit(1 - share),
        ),
        None,
    )


def _besides(window: Window, weighed: Sequence[tuple[Rule, Claim]]) -> tuple[str, ...]:
    """What costs something, and not enough to count."""
    costly = sorted(weighed, key=lambda each: -window.share(each[1].cost_s))
    worth = [
        f"{_name(rule)} {percent(window.share(claim.cost_s))} (counts from {percent(_threshold(rule, claim))} on)"
        for rule, claim in costly
        if window.share(claim.cost_s) >= WORTH_A_WORD
    ]
    return (f"Besides: {', '.join(worth)}.",) if worth else ()


def _threshold(rule: Rule, claim: Claim) -> float:
    return rule.threshold if claim.counts_from is None else claim.counts_from


def _name(rule: Rule) -> str:
    return rule.cause.value.replace("_", " ")


def _summary(what: str, share: float) -> str:
    return f"{what[0].upper()}{what[1:]} ({percent(share)} of the step)."


def _error(window: Window, claim: Claim) -> float:
    """Standard error of a claim's share."""
    shares = claim.cost_s / float(window.step_s.mean())
    return max(block_error(without_shift(np.asarray(shares, dtype=np.float64))), LEAST_ERROR)


def _unmeasured(evidence: Evidence) -> str:
    """Without which nobody can say that steps are mostly compute."""
    phases = evidence.window.phases
    needed = [Phase.DATA_WAIT, Phase.FORWARD, Phase.BACKWARD]
    if evidence.world_size > 1:
        needed.append(Phase.COMMUNICATION)
    return " and ".join(phase.value.replace("_", " ") for phase in needed if phase not in phases)


def _unsampled(evidence: Evidence) -> tuple[str, ...]:
    """What no sample says anything of."""
    groups: dict[str, tuple[str, ...]] = {"utilisation": ("gpu_utilisation", "cpu_utilisation")}
    if evidence.world_size > 1:
        groups["heartbeats"] = ("heartbeat_timeouts",)
        groups["TCP retransmits"] = ("tcp_retransmits",)
    return tuple(
        f"{name}: not sampled in these steps"
        for name, metrics in groups.items()
        if not any(evidence.mean_by_rank(metric) for metric in metrics)
    )
