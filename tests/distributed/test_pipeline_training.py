"""Models cut into stages, through a Trainer: numbers of one process, for every schedule and layout."""

from __future__ import annotations

from typing import Any

import pytest
from torch.testing import assert_close

from tests.distributed.pipeline_runs import StageCase, StageOutcome, reference, train
from tests.support.ranks import RankPool
from tests.support.reference import assert_same
from tests.support.sweeps import sampled

LAYOUTS: dict[str, dict[str, list[int]]] = {
    "2": {"a": [0, 1]},
    "4": {"a": [0, 1, 2, 3]},
    "2+2": {"a": [0, 1], "b": [2, 3]},
    "cyclic": {"a": [0, 2], "b": [1, 3]},
    "3+1": {"a": [0, 1, 2], "b": [3]},
}


def check(outcomes: list[StageOutcome], case: StageCase) -> None:
    """All ranks equal the reference, a few roundings of values near 1 apart; losses are larger, hence rtol.

    In fp32 a rounding is 6e-8, and in fp64 1e-16.
    """
    atol, rtol = (1e-13, 1e-13) if case.is_double else (1e-6, 2e-6)
    steps = reference(case, 1 + max(outcome.data_rank for outcome in outcomes))
    losses = [sum(ranks) / len(ranks) for step in steps for ranks in step.rank_losses]
    for outcome in outcomes:
        assert_close(outcome.losses, losses, rtol=rtol, atol=atol)
        own = losses if case.loss == "ignoring" else [loss[outcome.data_rank] for s in steps for loss in s.rank_losses]
        if case.loss != "ignoring" and case.loss != "sum":  # a mean over what one pipeline read
            assert_close(outcome.logged, own, rtol=rtol, atol=atol)
        assert_same(outcome.weights, steps[-1].weights, atol=atol)
        assert outcome.kinds == {"Parameter"}
        assert outcome.weights.keys() == outcomes[0].weights.keys()
    assert_same(outcomes[0].optimizer_state, steps[-1].optimizer_state, atol=10 * atol)


def pipe(schedule: str = "1f1b", **options: Any) -> dict[str, Any]:
    return {"schedule": schedule, "micro_batches": 4, **options}


BY_NORM: dict[str, Any] = {"gradient_clip_val": 0.5}
DOUBLE: dict[str, Any] = {"precision": "64-true"}
CASES = {
    "gpipe-2": ("2", StageCase(pipeline=pipe("gpipe"), optimizer="adamw")),
    "1f1b-2-accumulation": ("2", StageCase(pipeline=pipe(), accumulation=3, trainer=BY_NORM)),
    "1f1b-4": ("4", StageCase(pipeline=pipe(), trainer=BY_NORM)),
    "1f1b-2+2-tied": ("2+2", StageCase("gpt", pipeline=pipe(), optimizer="adamw", accumulation=3, trainer=BY_NORM)),
    "interleaved-2-tied": ("2", StageCase("gpt", pipeline=pipe("interleaved_1f1b"), trainer=BY_NORM)),
    "zero_bubble-2": ("2", StageCase("gpt", pipeline=pipe("interleaved_zero_bubble"), optimizer="adamw")),
    "zbv-2-tied": ("2", StageCase("gpt", pipeline=pipe("zbv"), optimizer="adamw", trainer=BY_NORM)),
    "zbv-2+2-accumulation": ("2+2", StageCase("gpt", pipeline=pipe("zbv"), accumulation=3, trainer=BY_NORM)),
    "dualpipev-2": ("2", StageCase("gpt", pipeline=pipe("dualpipev"))),
    "uneven-4": ("4", StageCase(pipeline=pipe(), size=7)),
    "short-4": ("4", StageCase(pipeline=pipe(), last_size=2)),
    "sum-2": ("2", StageCase(pipeline=pipe(), loss="sum", size=6, trainer=BY_NORM)),
    "ignoring-2+2": ("2+2", StageCase("gpt", pipeline=pipe(), loss="ignoring", accumulation=3)),
    "frozen-4": ("4", StageCase("frozen", pipeline=pipe())),
    "frozen-zero_bubble-2": ("2", StageCase("frozen", pipeline=pipe("interleaved_zero_bubble"))),
    "streams-2": ("2", StageCase("streams", pipeline=pipe(), size=5)),
    "streams-zbv": ("2", StageCase("streams", pipeline=pipe("zbv"))),
    "cyclic-4": (
        "cyclic",
        StageCase(pipeline=pipe(size=4), trainer={"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}),
    ),
    "3+1": ("3+1", StageCase(pipeline=pipe(size=2), accumulation=3)),
    "by_hand-2": ("2", StageCase(pipeline=pipe(split=[7, 2]))),
    # sums of losses let weights grow until a few roundings of fp32 are more than 1e-6
    "double-sum-frozen-2": ("2", StageCase("frozen", pipeline=pipe(), loss="sum", trainer=DOUBLE)),
    "double-sum-frozen-zbv": (
        "2",
        StageCase("frozen", pipeline=pipe("zbv"), loss="sum", accumulation=3, trainer=DOUBLE),
    ),
    "double-sum-frozen-4": ("4", StageCase("frozen", pipeline=pipe(), loss="sum", trainer={**DOUBLE, **BY_NORM})),
    "double-2+2-tied": (
        "2+2",
        StageCase("gpt", pipeline=pipe("zbv"), optimizer="adamw", accumulation=3, trainer={**DOUBLE, **BY_NORM}),
    ),
}


ALWAYS = (
    "gpipe-2",
    "1f1b-2-accumulation",
    "1f1b-2+2-tied",
    "interleaved-2-tied",
    "zero_bubble-2",
    "zbv-2-tied",
    "zbv-2+2-accumulation",
    "uneven-4",
    "short-4",
    "ignoring-2+2",
    "frozen-4",
    "streams-zbv",
    "cyclic-4",
    "3+1",
    "double-sum-frozen-zbv",
    "double-sum-frozen-4",
    "double-2+2-tied",
)


@pytest.mark.parametrize(("layout", "case"), sampled(CASES, ALWAYS))
def test_equals_one_process(ranks: RankPool, layout: str, case: StageCase) -> None:
    check(ranks.run(train, layout=LAYOUTS[layout], args=(case,)), case)
