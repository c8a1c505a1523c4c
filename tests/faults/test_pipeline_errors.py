"""A stage of a pipeline that fails, dies or stops: all ranks end, and are told of stage, micro-batch and rank."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.lightning_runs import loader_of, strategy_of, trainer_on_pool
from tests.distributed.pipeline_runs import StageCase, StageLearner, strategy_for
from tests.faults.fits import ending_of_fit
from tests.faults.runs import HOSTS
from tests.support.faults import InjectedError
from tests.support.ranks import Died, RankPool
from tests.support.tasks import RankContext

TIMEOUT_S = 8.0
PATIENT_S = 120.0
"""Longer than a call may take: with it, ranks that are told of a failure only when their wait is over fail the test."""
SAID = "the disk of this rank is full"


class Trip(nn.Module):
    """Passes values on, until a rank trips in its forward or in its backward."""

    def __init__(self, phase: str, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.phase, self.kind, self.batch, self.count = phase, kind, 0, 0

    def begin(self, batch: int) -> None:
        self.batch, self.count = batch, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        self.count += 1
        if self.batch == 1 and self.count == 3:  # the third micro-batch of the second batch
            if self.phase == "forward":
                self.fail()
            else:
                y.register_hook(self.fail)
        return y

    def fail(self, gradient: Any = None) -> None:
        if self.kind == "never":
            return
        if self.kind == "raise":
            raise InjectedError(SAID)
        os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)


class Trips(StageLearner):
    """Has layers that trip."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for module in self.modules():
            if isinstance(module, Trip):
                module.begin(batch_idx)


class Tripping(Trips):
    def __init__(self, case: StageCase, stage: int, phase: str, kind: str) -> None:
        super().__init__(case)
        layers: list[nn.Module] = [nn.Linear(7, 7) for _ in range(4)]
        layers[stage] = nn.Sequential(layers[stage], Trip(phase, kind))
        self.net = nn.Sequential(*layers, nn.Linear(7, 3))


def train(context: RankContext, stage: int, phase: str, kind: str) -> dict[str, Any]:
    """How this rank's fit ended."""
    case = StageCase(pipeline={"size": 4, "micro_batches": 4, "split": [1, 1, 1, 2]})
    module = Tripping(case, stage, phase, kind)
    timeout_s = PATIENT_S if kind == "raise" else TIMEOUT_S
    strategy = strategy_of(parallel={"mode": "pipeline", "pipeline": case.pipeline}, sync={"timeout_s": timeout_s})
    trainer = trainer_on_pool(context, strategy, limit_val_batches=0)
    return ending_of_fit(trainer, module)


@pytest.mark.parametrize(("stage", "phase"), [(0, "backward"), (1, "forward"), (2, "backward"), (3, "forward")])
def test_a_stage_that_raises_ends_all_ranks(ranks: RankPool, stage: int, phase: str) -> None:
    ended = ranks.run(train, layout=HOSTS, args=(stage, phase, "raise"), init_group=False, fresh=True, deadline_s=60)
    assert SAID in ended[stage]["text"], ended[stage]
    assert not ended[stage]["is_ours"], "the user's error is not ours"
    host = "a" if stage < 2 else "b"
    for other in (other for other in range(4) if other != stage):
        text = ended[other]["text"]
        assert ended[other]["is_ours"], ended[other]
        assert f"rank {stage} (host {host})" in text
        assert f"the {phase} of micro-batch 2 in stage {stage}" in text
        assert SAID in text


@pytest.mark.parametrize(("stage", "phase", "kind"), [(3, "forward", "kill"), (1, "backward", "kill")])
def test_a_stage_that_dies_is_named(ranks: RankPool, stage: int, phase: str, kind: str) -> None:
    ended = ranks.run(train, layout=HOSTS, args=(stage, phase, kind), init_group=False, may_die=[stage], deadline_s=60)
    host = "a" if stage < 2 else "b"
    for other, ending in enumerate(ended):
        if other == stage:
            assert isinstance(ending, Died)
            continue
        assert ending["is_ours"], ending
        assert f"rank {stage} (host {host})" in ending["text"], ending


def train_sharded(context: RankContext, stage: int, phase: str) -> dict[str, Any]:
    """As :func:`train`, in two pipelines whose stages are sharded; one of them trips."""
    case = StageCase(pipeline={"size": 2, "micro_batches": 4, "split": [2, 3]})
    module = Tripping(case, 2 * stage, phase, "raise" if context.rank == stage else "never")
    parallel = {"mode": "zero2", "pipeline": case.pipeline}
    trainer = trainer_on_pool(
        context, strategy_of(parallel=parallel, sync={"timeout_s": PATIENT_S}), limit_val_batches=0
    )
    return ending_of_fit(trainer, module)


@pytest.mark.parametrize(("stage", "phase"), [(0, "backward"), (1, "forward")])
def test_a_sharded_stage_that_raises_ends_all_ranks(ranks: RankPool, stage: int, phase: str) -> None:
    """The ranks of its own pipeline wait for its messages, those of the other one for its shards."""
    ended = ranks.run(train_sharded, layout=HOSTS, args=(stage, phase), init_group=False, fresh=True, deadline_s=60)
    for ending in ended:
        assert SAID in ending["text"], ended


# -- no deadlock ------------------------------------------------------------------------------------------------------


class Slow(nn.Module):
    """Takes its time, another one for each stage and batch."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.number, self.calls = number, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        time.sleep((self.number * 7 + self.calls * 3) % 5 / 2000)
        return self.inner(x)


class Unequal(StageLearner):
    def __init__(self, case: StageCase, stages: int) -> None:
        super().__init__(case)
        self.net = nn.Sequential(*(Slow(number) for number in range(stages)), nn.Linear(7, 3))

    def train_dataloader(self) -> Any:
        return loader_of([batch for _ in range(5) for batch in self.case.batches(0)])


def train_long(context: RankContext, case: StageCase, stages: int) -> int:
    """50 steps, validated in between, then tested."""
    module = Unequal(case, stages)
    strategy = strategy_for(case)
    trainer = trainer_on_pool(context, strategy, max_epochs=-1, max_steps=50, val_check_interval=7)
    trainer.fit(module)
    trainer.test(module, verbose=False)
    return int(trainer.global_step)


@pytest.mark.parametrize(
    ("size", "schedule", "per_rank"), [(2, "1f1b", 1), (4, "1f1b", 1), (4, "interleaved_1f1b", 2), (4, "zbv", 2)]
)
def test_unequal_stages_never_wait_for_each_other(ranks: RankPool, size: int, schedule: str, per_rank: int) -> None:
    stages = size * per_rank
    case = StageCase(pipeline={"schedule": schedule, "micro_batches": 4}, size=6)
    assert ranks.run(train_long, world_size=size, args=(case, stages), deadline_s=60) == [50] * size


@pytest.mark.parametrize(("schedule", "per_rank"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2)])
def test_unequal_sharded_stages_never_wait_for_each_other(ranks: RankPool, schedule: str, per_rank: int) -> None:
    pipeline = {"size": 2, "schedule": schedule, "micro_batches": 4}
    case = StageCase(pipeline=pipeline, parallel={"mode": "zero2"}, size=6)
    assert ranks.run(train_long, layout=HOSTS, args=(case, 2 * per_rank), deadline_s=60) == [50] * 4
