"""Stages whose gradients and optimizer state are sharded, through a Trainer: numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.pipeline_runs import StageCase, train
from tests.distributed.test_pipeline_training import BY_NORM, DOUBLE, LAYOUTS, check
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled


def pipe(schedule: str = "1f1b", **options: Any) -> dict[str, Any]:
    return {"schedule": schedule, "micro_batches": 4, "size": 2, **options}


ZERO1: dict[str, Any] = {"mode": "zero1"}
ZERO2: dict[str, Any] = {"mode": "zero2"}
CASES = {
    "zero1-1f1b-4": ("4", StageCase("gpt", pipeline=pipe(), parallel=ZERO1, optimizer="adamw", trainer=BY_NORM)),
    "zero2-1f1b-2+2-tied": (
        "2+2",
        StageCase("gpt", pipeline=pipe(), parallel=ZERO2, optimizer="adamw", accumulation=3, trainer=BY_NORM),
    ),
    "zero1-1f1b-2+2-tied": (
        "2+2",
        StageCase("gpt", pipeline=pipe(), parallel=ZERO1, accumulation=3, trainer=BY_NORM),
    ),
    "zero2-odd-cyclic": ("cyclic", StageCase(pipeline=pipe(), parallel=ZERO2, accumulation=3, trainer=BY_NORM)),
    "zero2-gpipe-adamw": ("2+2", StageCase(pipeline=pipe("gpipe"), parallel=ZERO2, optimizer="adamw")),
    "zero2-interleaved-tied": (
        "2+2",
        StageCase("gpt", pipeline=pipe("interleaved_1f1b"), parallel=ZERO2, optimizer="adamw", trainer=BY_NORM),
    ),
    "zero1-zero_bubble": (
        "cyclic",
        StageCase("gpt", pipeline=pipe("interleaved_zero_bubble"), parallel=ZERO1, accumulation=3),
    ),
    "zero2-zero_bubble": (
        "2+2",
        StageCase("gpt", pipeline=pipe("interleaved_zero_bubble"), parallel=ZERO2, optimizer="adamw", trainer=BY_NORM),
    ),
    "zero2-zbv-tied": (
        "2+2",
        StageCase("gpt", pipeline=pipe("zbv"), parallel=ZERO2, optimizer="adamw", accumulation=3, trainer=BY_NORM),
    ),
    "zero1-zbv-4": ("4", StageCase(pipeline=pipe("zbv"), parallel=ZERO1, trainer=BY_NORM)),
    "zero2-dualpipev": ("2+2", StageCase("gpt", pipeline=pipe("dualpipev"), parallel=ZERO2)),
    "zero2-uneven-short": ("2+2", StageCase(pipeline=pipe(), parallel=ZERO2, size=7, last_size=1)),
    "zero2-sum": ("2+2", StageCase(pipeline=pipe(), parallel=ZERO2, loss="sum", size=6, trainer=BY_NORM)),
    "zero1-ignoring": ("2+2", StageCase("gpt", pipeline=pipe(), parallel=ZERO1, loss="ignoring", accumulation=3)),
    "zero2-frozen": ("2+2", StageCase("frozen", pipeline=pipe(), parallel=ZERO2)),
    "zero1-frozen-zero_bubble": (
        "2+2",
        StageCase("frozen", pipeline=pipe("interleaved_zero_bubble"), parallel=ZERO1, accumulation=3),
    ),
    "zero2-streams-zbv": ("2+2", StageCase("streams", pipeline=pipe("zbv"), parallel=ZERO2, size=5)),
    "zero2-by_value": (
        "cyclic",
        StageCase(
            pipeline=pipe(),
            parallel=ZERO2,
            trainer={"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
        ),
    ),
    "zero2-double-sum-frozen": (
        "2+2",
        StageCase("frozen", pipeline=pipe(), parallel=ZERO2, loss="sum", accumulation=3, trainer={**DOUBLE, **BY_NORM}),
    ),
    "zero2-flat": ("2+2", StageCase("gpt", pipeline=pipe(), parallel=ZERO2, strategy={"sync": {"algorithm": "flat"}})),
}


ALWAYS = (
    "zero2-1f1b-2+2-tied",
    "zero2-odd-cyclic",
    "zero1-zero_bubble",
    "zero2-zbv-tied",
    "zero1-ignoring",
    "zero2-uneven-short",
    "zero2-double-sum-frozen",
)


@pytest.mark.parametrize(("layout", "case"), sampled(CASES, ALWAYS))
def test_equals_one_process(ranks: RankPool, layout: str, case: StageCase) -> None:
    check(ranks.run(train, layout=LAYOUTS[layout], args=(case,)), case)
