"""Schedules: which numbers work, who has which stage, in which order ranks work and how long they idle."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.config import PIPELINE_SCHEDULES, PipelineConfig
from lightning_dist.config.pipeline import SPLIT_BACKWARD, for_batch, position_of_stage, stages_of_position, takes
from lightning_dist.errors import CombinationError, ConfigError, UnknownOptionError
from lightning_dist.laws import pipeline_bubble
from lightning_dist.parallel.pipeline.schedules import Schedule, one_stage_order
from lightning_dist.parallel.pipeline.timeline import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    predict,
)


class Stub:
    """What torch's schedules look at before they run."""

    def __init__(self, index: int, positions: tuple[int, ...], position: int) -> None:
        self.stage_index, self.num_stages = index, len(positions)
        self.group_rank, self.group_size = position, 1 + max(positions)
        self.submod: Any = None
        self.has_backward = True

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1


def orders_of(name: str, size: int, micro_batches: int) -> list[list[Action]]:
    config = PipelineConfig(schedule=name)
    positions = position_of_stage(name, size, size * config.stages_per_rank)
    stages: Any = [Stub(stage, positions, 0) for stage in stages_of_position(positions, 0)]
    return Schedule(name, stages, micro_batches, lambda output, chunk: output).orders()


def seconds(stages: int, forward: float = 1.0) -> dict[tuple[str, int], float]:
    kinds = {FORWARD: forward, BACKWARD: 2 * forward, BACKWARD_INPUT: forward, BACKWARD_WEIGHT: forward}
    return {(kind, stage): taken for kind, taken in kinds.items() for stage in range(stages)}


@pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
@pytest.mark.parametrize(("size", "micro_batches"), [(2, 4), (4, 8), (4, 16)])
def test_every_order_does_everything_once_and_never_waits_in_a_circle(name: str, size: int, micro_batches: int) -> None:
    orders = orders_of(name, size, micro_batches)
    stages = size * PipelineConfig(schedule=name).stages_per_rank
    done = Counter(action for order in orders for action in order)
    assert set(done.values()) == {1}
    for stage in range(stages):
        for chunk in range(micro_batches):
            assert Action(FORWARD, stage, chunk) in done
            whole = Action(BACKWARD, stage, chunk) in done
            parts = Action(BACKWARD_INPUT, stage, chunk) in done and Action(BACKWARD_WEIGHT, stage, chunk) in done
            assert whole != parts
            assert name in SPLIT_BACKWARD or whole
    assert predict(orders, seconds(stages)).length_s > 0


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [4, 8, 16, 28])
def test_idle_share_is_the_formulas(name: str, micro_batches: int) -> None:
    timeline = predict(orders_of(name, 4, micro_batches), seconds(4))
    assert timeline.idle_share == pytest.approx(pipeline_bubble(4, micro_batches))
    assert timeline.idle_shares == pytest.approx([pipeline_bubble(4, micro_batches)] * 4)


def test_more_stages_a_rank_and_split_backwards_idle_less() -> None:
    shares = {}
    for name in PIPELINE_SCHEDULES:
        stages = 4 * PipelineConfig(schedule=name).stages_per_rank
        shares[name] = predict(orders_of(name, 4, 8), seconds(stages)).idle_share
    assert shares["interleaved_1f1b"] == pytest.approx(pipeline_bubble(4, 8, virtual_stages=2))
    assert shares["interleaved_zero_bubble"] < shares["interleaved_1f1b"] < shares["1f1b"]
    assert shares["zbv"] <= 0.12


def test_1f1b_keeps_as_many_micro_batches_as_there_are_stages_after_it() -> None:
    for stage in range(4):
        kept, most = 0, 0
        for action in one_stage_order("1f1b", stage, 4, 16):
            kept += 1 if action.kind == FORWARD else -1
            most = max(most, kept)
        assert most == 4 - stage


def test_orders_that_wait_for_each_other_are_an_error() -> None:
    forward, backward = Action(FORWARD, 0, 0), Action(BACKWARD, 0, 0)
    other = [Action(BACKWARD, 1, 0), Action(FORWARD, 1, 0)]
    with pytest.raises(ValueError, match="wait for each other"):
        predict([[forward, backward], other], seconds(2))


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "size", "said"),
    [
        ({"micro_batches": 2}, 4, r"at least 4, one a rank\. Write one of 4 \(idle 43%\)"),
        ({"schedule": "dualpipev", "micro_batches": 4}, 4, "at least 8, one a stage"),
        ({"schedule": "interleaved_1f1b", "micro_batches": 9}, 4, "equal rounds of about 4"),
    ],
)
def test_a_number_of_micro_batches_that_cannot_work(options: dict[str, Any], size: int, said: str) -> None:
    with pytest.raises(CombinationError, match=said) as caught:
        PipelineConfig(size=size, **options)
    assert "would idle for" in str(caught.value)
    assert "gpipe" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"schedule": "2f2b"}, UnknownOptionError, "1f1b"),
        ({"schedule": "1f1b", "virtual_stages": 2}, CombinationError, "interleaved_1f1b"),
        ({"schedule": "zbv", "virtual_stages": 3}, CombinationError, "two stages a rank"),
        ({"size": 2, "split": [1, 2, 3]}, ConfigError, "has 3 stages, and there are 2"),
        ({"split": [0, 2]}, ConfigError, "at least one"),
        ({"micro_batches": 0}, ConfigError, "at least 1"),
        ({"balance": "luck"}, UnknownOptionError, "parameters"),
    ],
)
def test_other_values_that_cannot_work(options: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        PipelineConfig(**options)


@given(
    name=st.sampled_from(PIPELINE_SCHEDULES),
    size=st.integers(2, 6),
    wanted=st.integers(1, 40),
    samples=st.integers(1, 40),
)
def test_a_batch_of_any_size_finds_a_schedule(name: str, size: int, wanted: int, samples: int) -> None:
    schedule, count = for_batch(name, size, wanted, samples)
    assert takes(schedule, size, count)
    assert count <= min(wanted, samples)
    stages = size * PipelineConfig(schedule=name).stages_per_rank
    assert position_of_stage(schedule, size, stages) == position_of_stage(name, size, stages), "stages stay in place"


def test_the_default_number_works_everywhere() -> None:
    for name in PIPELINE_SCHEDULES:
        for size in range(2, 17):
            PipelineConfig(schedule=name, size=size)


def test_positions() -> None:
    assert position_of_stage("interleaved_1f1b", 2, 4) == (0, 1, 0, 1)
    assert position_of_stage("zbv", 2, 4) == (0, 1, 1, 0)
    assert stages_of_position((0, 1, 1, 0), 0) == (0, 3)
