"""A rank that fails, dies or stops where the layers of a stage are split over ranks: all ranks end in seconds."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.distributed.lightning_runs import strategy_of, trainer_on_pool
from tests.distributed.pipeline_runs import StageCase
from tests.faults.fits import ending_of_fit
from tests.faults.runs import HOSTS
from tests.faults.test_pipeline_errors import SAID, Trip, Trips
from tests.support.ranks import Died, RankPool
from tests.support.tasks import RankContext

TIMEOUT_S = 120.0  # longer than a call may take: whoever waits for it fails the test
PIPELINE = {"size": 2, "micro_batches": 4, "split": [2, 3]}
PLAN = {"net.*.0": "column", "net.*.2": "row"}


class Tripping(Trips):
    """Fails on one rank, beside which another has the same layers."""

    def __init__(self, case: StageCase, rank: int, own: int, phase: str, kind: str) -> None:
        super().__init__(case)
        blocks = [nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 7)) for _ in range(4)]
        for block in blocks[1:3]:  # one in each stage
            block.append(Trip(phase, kind if rank == own else "never"))
        self.net = nn.Sequential(*blocks, nn.Linear(7, 3))


def train(context: RankContext, rank: int, phase: str, kind: str) -> dict[str, Any]:
    """How this rank's fit ended."""
    module = Tripping(StageCase(), rank, context.rank, phase, kind)
    parallel = {"mode": "pipeline", "pipeline": PIPELINE, "tensor": {"size": 2, "plan": PLAN}}
    strategy = strategy_of(parallel=parallel, sync={"timeout_s": TIMEOUT_S})
    trainer = trainer_on_pool(context, strategy, limit_val_batches=0)
    return ending_of_fit(trainer, module)


@pytest.mark.parametrize(
    ("rank", "phase"),
    [
        (0, "backward"),
        pytest.param(1, "forward", marks=pytest.mark.sweep),
        pytest.param(2, "backward", marks=pytest.mark.sweep),
        (3, "forward"),
    ],
)
def test_a_rank_that_raises_ends_all(ranks: RankPool, rank: int, phase: str) -> None:
    ended = ranks.run(train, layout=HOSTS, args=(rank, phase, "raise"), init_group=False, fresh=True, deadline_s=60)
    assert SAID in ended[rank]["text"], ended
    assert not ended[rank]["is_ours"], "the user's error is not ours"
    for other in (other for other in range(4) if other != rank):
        text = ended[other]["text"]
        assert ended[other]["is_ours"], ended[other]
        assert f"rank {rank} (host {'a' if rank < 2 else 'b'})" in text, text
        assert f"the {phase} of micro-batch 2 in stage {rank // 2}" in text
        assert SAID in text


@pytest.mark.parametrize(("rank", "phase"), [(3, "forward"), pytest.param(0, "backward", marks=pytest.mark.sweep)])
def test_a_rank_that_dies_is_named(ranks: RankPool, rank: int, phase: str) -> None:
    arguments = (rank, phase, "kill")
    ended = ranks.run(train, layout=HOSTS, args=arguments, init_group=False, may_die=[rank], deadline_s=60)
    for other, ending in enumerate(ended):
        if other == rank:
            assert isinstance(ending, Died)
            continue
        assert ending["is_ours"], ending
        assert f"rank {rank} (host {'a' if rank < 2 else 'b'})" in ending["text"], ending
