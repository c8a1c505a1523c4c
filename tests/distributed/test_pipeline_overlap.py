"""Pipelines average a stage's gradients while stages before it still work."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor, nn

from tests.distributed.lightning_runs import loader_of, trainer_on_pool
from tests.distributed.pipeline_runs import StageCase, StageLearner, make_batches, strategy_for
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

WORK_S = 0.03


class Busy(nn.Linear):
    """Takes its time in forward and in backward."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(WORK_S)
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: time.sleep(WORK_S))
        return y


class Working(StageLearner):
    def __init__(self, case: StageCase) -> None:
        super().__init__(case)
        self.net = nn.Sequential(Busy(7, 7), Busy(7, 3))

    def train_dataloader(self) -> Any:
        return loader_of(make_batches("odd", 3, seed=0, size=4))


def spans(context: RankContext, case: StageCase) -> dict[str, list[tuple[int, int]]]:
    """(start, end) of the last batch's backwards and of what averages; on one clock, that of the machine."""
    strategy = strategy_for(case)
    trainer = trainer_on_pool(context, strategy, limit_val_batches=0)
    trainer.fit(Working(case))
    events = [event for event in strategy.events.snapshot() if event.step == 2]
    averages = [e for e in events if e.attributes.get("operation") in ("reduce_scatter", "all_gather", "reduce")]
    return {
        "backward": [(e.start_ns, e.end_ns) for e in events if e.name == "pipeline.backward"],
        "averages": [(e.start_ns, e.end_ns) for e in averages],
        "lanes": sorted({e.name for e in events}),  # type: ignore[dict-item]  # for the message
    }


def test_the_last_stage_averages_while_the_first_still_runs_backward(ranks: RankPool) -> None:
    case = StageCase(pipeline={"size": 2, "micro_batches": 4, "split": [1, 1]})
    found = ranks.run(spans, layout={"a": [0, 1], "b": [2, 3]}, args=(case,))
    for first, last in ((0, 1), (2, 3)):
        assert found[last]["averages"], found[last]["lanes"]
        begun = min(start for start, _ in found[last]["averages"])
        assert begun >= found[last]["backward"][-1][1], "not before its own gradients are complete"
        assert begun < found[first]["backward"][-1][1], "beside the work of the stage before it"
