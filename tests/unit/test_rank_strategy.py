"""What a strategy's ranks ask each other, as far as one rank shows it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_dist import HierDistStrategy


@pytest.mark.parametrize("how", ["sum", "mean", dist.ReduceOp.MAX])
def test_a_rank_outside_of_a_group_keeps_its_value(
    how: str | dist.ReduceOp.RedOpType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``dist.new_group`` gives it a number instead, which ``self.log(sync_dist_group=...)`` passes on."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    kept = HierDistStrategy().reduce(torch.tensor(3.0), dist.GroupMember.NON_GROUP_MEMBER, how)
    assert kept.item() == 3.0
