"""What the strategy makes of values that ranks log: sums, means and extremes in the type that Lightning expects."""

from __future__ import annotations

import torch

from lightning_dist import HierDistStrategy
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext


def reduced(context: RankContext) -> dict[str, float]:
    strategy = HierDistStrategy()
    values = {
        "mean": (torch.tensor(context.rank + 1.0), "mean"),
        "mean of whole numbers": (torch.tensor(context.rank + 1), "mean"),
        "torch's mean": (torch.tensor(context.rank + 1.0), torch.distributed.ReduceOp.AVG),
        "sum": (torch.tensor(context.rank + 1.0), "sum"),
        "none": (torch.tensor(context.rank + 1.0), None),
        "max": (torch.tensor(context.rank + 1.0), "max"),
        "half": (torch.tensor(60000.0, dtype=torch.float16), "mean"),
    }
    return {name: float(strategy.reduce(value, reduce_op=how)) for name, (value, how) in values.items()}


def test_values_are_reduced_as_they_are_asked_for(ranks: RankPool) -> None:
    for said in ranks.run(reduced, world_size=2):
        assert said == {
            "mean": 1.5,
            "mean of whole numbers": 1.5,
            "torch's mean": 1.5,
            "sum": 3.0,
            "none": 3.0,
            "max": 2.0,
            "half": 60000.0,
        }
