"""Ranks that save values of different steps make no checkpoint."""

from __future__ import annotations

import pytest
import torch

from lightning_dist.checkpoint.save_planner import SharedSavePlanner
from lightning_dist.errors import CheckpointError


def plan_of_ranks(steps: list[int]) -> None:
    """Plan a save of ranks that are at these steps."""
    planners = [SharedSavePlanner(moment={"step": step, "epoch": 0}) for step in steps]
    plans = []
    for rank, planner in enumerate(planners):
        planner.set_up_planner({"w": torch.zeros(4)}, None, rank == 0)
        plans.append(planner.create_local_plan())
    planners[0].create_global_plan(plans)


def test_ranks_at_one_step_make_a_checkpoint() -> None:
    plan_of_ranks([3, 3, 3])


def test_ranks_at_different_steps_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"rank 0 has step 3, epoch 0, rank 2 has step 4, epoch 0; let all ranks"):
        plan_of_ranks([3, 3, 4])
