"""The schedules of :mod:`torch.distributed.pipelining` by their names here, and the order in which each works."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, _PipelineSchedule

from lightning_dist.config.pipeline import ONE_STAGE, SPLIT_BACKWARD
from lightning_dist.parallel.pipeline.stage import LayerStage
from lightning_dist.parallel.pipeline.timeline import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action

SCHEDULES: dict[str, type[_PipelineSchedule]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}

LossOf = Callable[[Any, int], Tensor]
"""The loss of the last stage's output for a micro-batch, as it counts in the whole."""


class Schedule:
    """One of torch's schedules over this rank's stages, for one number of micro-batches.

    Args:
        name: One of :data:`SCHEDULES`.
        stages: This rank's, in their order.
        micro_batches: How many.
        loss_of: Called on the last stage.
    """

    def __init__(self, name: str, stages: Sequence[LayerStage], micro_batches: int, loss_of: LossOf) -> None:
        self.name = name
        chosen: Any = SCHEDULES[name]
        if name == "gpipe" and len(stages) > 1:
            chosen = ScheduleLoopedBFS  # the same with several stages a rank
        given = stages[0] if chosen in (ScheduleGPipe, Schedule1F1B) else list(stages)
        self._count = micro_batches
        self._torch: Any = chosen(given, micro_batches, loss_fn=loss_of, scale_grads=False)
        # Our stages know what they will receive; torch would find out by running the model and sending what it finds.
        for name_of_flag in ("_stage_forward_initialized", "_stage_backward_initialized"):
            setattr(self._torch, name_of_flag, True)
            setattr(self._torch, name_of_flag.replace("_stage_", "_stages_"), True)

    @property
    def splits_backward(self) -> bool:
        """Whether backward comes in two parts."""
        return self.name in SPLIT_BACKWARD

    def run(self, inputs: Sequence[tuple[Any, ...]]) -> None:
        """Forward and backward of all micro-batches.

        Args:
            inputs: Of each micro-batch, for the first stage; empty tuples on other ranks.
        """
        with _quiet():
            self._torch._step_microbatches(list(inputs), None, list(range(self._count)))

    def orders(self) -> list[list[Action]]:
        """What each of the pipeline's ranks does, in its order."""
        if self.name in ONE_STAGE and isinstance(self._torch, ScheduleGPipe | Schedule1F1B):
            # torch 2.13 says of 1F1B that the last stage begins with the second micro-batch
            size = self._torch._num_stages
            return [one_stage_order(self.name, stage, size, self._count) for stage in range(size)]
        by_rank = self._torch.pipeline_order
        return [[action for each in by_rank[rank] for action in _actions(each)] for rank in sorted(by_rank)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Where a stage fails, torch logs the whole schedule on each rank; the error says where it was."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def one_stage_order(name: str, stage: int, stages: int, micro_batches: int) -> list[Action]:
    """What the rank of one stage does under ``gpipe`` or ``1f1b``."""
    ahead = micro_batches if name == "gpipe" else min(micro_batches, stages - stage)
    order = [Action(FORWARD, stage, chunk) for chunk in range(ahead)]
    for chunk in range(micro_batches):
        order.append(Action(BACKWARD, stage, chunk))
        if ahead + chunk < micro_batches:
            order.append(Action(FORWARD, stage, ahead + chunk))
    return order


_KINDS = {
    "F": FORWARD,
    "B": BACKWARD,
    "I": BACKWARD_INPUT,
    "W": BACKWARD_WEIGHT,
}


def _actions(action: Any) -> list[Action]:
    """Our actions for one of torch's; an idle slot has none, a pair that overlaps has two."""
    if action is None:
        return []
    if action.sub_actions:
        return [each for inner in action.sub_actions for each in _actions(inner)]
    kind = _KINDS.get(str(action.computation_type.value))
    if kind is None:
        return []
    return [Action(kind, action.stage_index, action.microbatch_index)]
