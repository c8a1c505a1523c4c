"""When the data do not allow a verdict, there is none, and it is said why."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_dist.monitor.diagnosis import diagnose
from lightning_dist.monitor.record import Phase, RankRecord, RunRecord
from lightning_dist.monitor.verdict import Cause
from tests.support.monitored import Model


def test_no_rank() -> None:
    record = RunRecord(Model().record().facts, {}, ("nothing was found",))
    verdict = diagnose(record)
    assert verdict.main is None
    assert verdict.no_verdict == "no rank has recorded a step"
    assert "nothing was found" in verdict.missing


@pytest.mark.parametrize("steps", [1, 4, 12])
def test_too_few_steps(steps: int) -> None:
    verdict = diagnose(Model(steps=steps).record())
    assert verdict.main is None
    assert f"{steps} steps" in (verdict.no_verdict or "")


def test_thirteen_steps_are_enough() -> None:
    assert diagnose(Model(steps=13).record()).main is not None


@pytest.mark.parametrize("phase", [Phase.COMMUNICATION, Phase.DATA_WAIT])
def test_unmeasured_phase_may_hide_the_cause(phase: Phase) -> None:
    verdict = diagnose(Model(unavailable={phase: "no hook here"}).record())
    assert verdict.main is None
    assert phase.value.replace("_", " ") in (verdict.no_verdict or "")
    assert f"{phase.value.replace('_', ' ')}: no hook here" in verdict.missing


def test_what_is_measured_can_still_be_named() -> None:
    """Without communication a loader that takes half of the step is found nevertheless."""
    verdict = diagnose(
        Model(times_s={Phase.DATA_WAIT: 0.04}, unavailable={Phase.COMMUNICATION: "no hook here"}).record()
    )
    assert verdict.main is not None
    assert verdict.main.cause is Cause.DATA_PIPELINE


def test_noise_around_the_threshold() -> None:
    """Some steps wait long: 9 % of the time, in two of five blocks."""
    record = Model(steps=53, times_s={Phase.DATA_WAIT: 0.0}).record()
    bursts = {13: 0.1, 14: 0.04, 44: 0.06}
    ranks = {}
    for rank, each in record.ranks.items():
        steps = tuple(
            dataclasses.replace(
                step,
                duration_s=step.duration_s + bursts.get(step.step, 0.0),
                phases={**step.phases, Phase.DATA_WAIT: bursts.get(step.step, 0.0)},
            )
            for step in each.steps
        )
        ranks[rank] = RankRecord(each.header, steps, each.samples)
    verdict = diagnose(RunRecord(record.facts, ranks))
    if verdict.main is None:
        assert "too noisy: data pipeline" in (verdict.no_verdict or "")
    else:
        assert verdict.main.confidence < 0.8


def test_time_that_is_spread_has_no_main_cause() -> None:
    verdict = diagnose(
        Model(
            times_s={
                Phase.FORWARD: 0.006,
                Phase.BACKWARD: 0.0094,
                Phase.DATA_WAIT: 0.003,
                Phase.OPTIMIZER: 0.0025,
                Phase.OTHER: 0.002,
            },
            communication_s=0.0097,
            idle_s=0.0048,
        ).record()
    )
    assert verdict.main is None
    assert "no cause stands out: compute 4" in (verdict.no_verdict or "")


def test_data_wait_that_is_not_told_apart_is_not_taken_for_the_host() -> None:
    verdict = diagnose(Model(times_s={Phase.DATA_WAIT: 0.03}, unavailable={Phase.DATA_WAIT: "no hook here"}).record())
    assert verdict.main is None
    assert "data wait could not be measured" in (verdict.no_verdict or "")


def test_what_was_not_sampled_is_listed() -> None:
    record = Model().record()
    bare = {rank: RankRecord(each.header, each.steps) for rank, each in record.ranks.items()}
    missing = diagnose(RunRecord(record.facts, bare)).missing
    assert [line.partition(":")[0] for line in missing] == ["utilisation", "heartbeats", "TCP retransmits"]


def test_a_rank_whose_file_is_torn_is_left_out() -> None:
    record = Model().record()
    ranks = dict(record.ranks)
    ranks[3] = RankRecord(ranks[3].header, ranks[3].steps[:10])
    verdict = diagnose(RunRecord(record.facts, ranks))
    assert verdict.main is not None
    assert verdict.steps == 90
    assert any("rank 3 recorded less than half" in line for line in verdict.missing)
