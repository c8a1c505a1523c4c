"""Models cut into stages whose layers are split too, through a Trainer: numbers of one process, for every schedule."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.pipeline_runs import StageCase, train
from tests.distributed.test_pipeline_training import check, pipe
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled

LAYOUTS: dict[str, dict[str, list[int]]] = {
    "4": {"a": [0, 1, 2, 3]},
    "2+2": {"a": [0, 1], "b": [2, 3]},
    "cyclic": {"a": [0, 2], "b": [1, 3]},
}
BY_NORM: dict[str, Any] = {"gradient_clip_val": 0.5}
BY_VALUE: dict[str, Any] = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}


def two_by_two(schedule: str = "1f1b", *, loss_parallel: bool = False, **options: Any) -> dict[str, Any]:
    """Options of a case: two stages, each on two ranks that share its layers."""
    tensor = {"size": 2, "loss_parallel": loss_parallel}
    return {"pipeline": pipe(schedule, size=2, **options), "parallel": {"tensor": tensor}}


CASES = {
    "1f1b-4-adamw": ("4", StageCase("even", **two_by_two(), optimizer="adamw", trainer=BY_NORM)),
    "1f1b-4-loss_parallel": ("4", StageCase("even", **two_by_two(loss_parallel=True), accumulation=3)),
    "1f1b-2+2": ("2+2", StageCase("even", **two_by_two(), accumulation=3, trainer=BY_NORM)),
    "1f1b-cyclic": ("cyclic", StageCase("decoder", **two_by_two(), optimizer="adamw", trainer=BY_VALUE)),
    "interleaved-2+2": (
        "2+2",
        StageCase("even", **two_by_two("interleaved_1f1b", loss_parallel=True), optimizer="adamw", trainer=BY_NORM),
    ),
    "zero_bubble-4": ("4", StageCase("even", **two_by_two("interleaved_zero_bubble"), trainer=BY_NORM)),
    "zero_bubble-cyclic": (
        "cyclic",
        StageCase("decoder", **two_by_two("interleaved_zero_bubble", loss_parallel=True), accumulation=3),
    ),
    "zbv-4": ("4", StageCase("even", **two_by_two("zbv"), optimizer="adamw", trainer=BY_NORM)),
    "zbv-2+2-loss_parallel": ("2+2", StageCase("even", **two_by_two("zbv", loss_parallel=True), accumulation=3)),
    "dualpipev-4": ("4", StageCase("decoder", **two_by_two("dualpipev"), trainer=BY_NORM)),
    "gpipe-2+2-uneven": ("2+2", StageCase("even", **two_by_two("gpipe", loss_parallel=True), size=7)),
    "1f1b-2+2-behind_head": ("2+2", StageCase("soft", **two_by_two(split=[6, 1], loss_parallel=True))),
    "ignoring-4": ("4", StageCase("even", **two_by_two(loss_parallel=True), loss="ignoring", accumulation=3)),
}


ALWAYS = ("1f1b-4-loss_parallel", "1f1b-cyclic", "interleaved-2+2", "zbv-4")


@pytest.mark.parametrize(("layout", "case"), sampled(CASES, ALWAYS))
def test_equals_one_process(ranks: RankPool, layout: str, case: StageCase) -> None:
    check(ranks.run(train, layout=LAYOUTS[layout], args=(case,)), case)
