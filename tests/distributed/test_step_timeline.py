"""StepTimeline on several ranks, under Lightning's strategies and each mode of ours: nothing is changed by it, nor by
ClusterMonitor beside it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from lightning_dist import ClusterMonitor, StepTimeline
from lightning_dist.monitor.record import Phase, RunRecord, StepRecord
from lightning_dist.monitor.run_files import read_run
from tests.distributed.lightning_runs import OddModule, loader_of, make_batches, sgd, strategy_of, trainer_on_pool
from tests.distributed.pipeline_runs import StageCase, StageLearner
from tests.distributed.tensor_runs import SplitCase, SplitLearner
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

BATCHES = 4
NAP_S = 0.2


class Reading(OddModule):
    """Gets its batches by itself, as the modules of other modes do.

    Args:
        batches: This rank's.
    """

    def __init__(self, batches: list[Any]) -> None:
        super().__init__(sgd)
        self._batches = batches

    def train_dataloader(self) -> Any:
        return loader_of(self._batches)


class FullySharded(Reading):
    """Sharded by the user, as Lightning's own strategy wants it."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


def reading(context: RankContext, kind: type[Reading] = Reading) -> Reading:
    return kind(make_batches(context.world_size, BATCHES)[context.rank])


def sharded(mode: str) -> tuple[Callable[[], Any], Callable[[RankContext], pl.LightningModule]]:
    return (lambda: strategy_of(parallel={"mode": mode})), reading


STAGES = StageCase(pipeline={"micro_batches": 4})  # as many stages as there are ranks
SPLIT = SplitCase()
RUNS: dict[str, tuple[Callable[[], Any], Callable[[RankContext], pl.LightningModule]]] = {
    "lightning ddp": (lambda: DDPStrategy(process_group_backend="gloo"), reading),
    "lightning fsdp2": (
        lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"),
        lambda context: reading(context, FullySharded),
    ),
    "ddp": (lambda: strategy_of(), reading),
    "zero1": sharded("zero1"),
    "zero2": sharded("zero2"),
    "zero3": sharded("zero3"),
    "hsdp": sharded("hsdp"),
    "tensor": (lambda: strategy_of(parallel={"mode": "tensor"}), lambda context: SplitLearner(SPLIT)),
    "pipeline": (
        lambda: strategy_of(parallel={"mode": "pipeline", "pipeline": STAGES.pipeline}),
        lambda context: StageLearner(STAGES),
    ),
}


@dataclass(frozen=True)
class Fitted:
    """What a fit left on a rank.

    Attributes:
        weights: Of the module, as this rank holds them.
        operations: Collectives of all groups between the first step and the last.
        run: What was written; on rank 0, of all ranks.
        problem: Of the capture.
    """

    weights: dict[str, torch.Tensor]
    operations: int
    run: RunRecord | None
    problem: str | None


class Counter(pl.Callback):
    """Counts what the backends were asked for, by anyone, C++ included."""

    started = operations = 0
    weights: dict[str, torch.Tensor]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.started = self.asked()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.operations = self.asked() - self.started
        state = trainer.strategy.lightning_module_state_dict()
        local = {name: getattr(value, "_local_tensor", value) for name, value in state.items()}
        self.weights = {name: value.detach().clone() for name, value in local.items()}

    def asked(self) -> int:
        groups = list(dist.distributed_c10d._world.pg_map)
        return sum(group._get_backend(torch.device("cpu"))._get_sequence_number_for_group() for group in groups)


def refuse(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a device is waited for")


def fit(context: RankContext, name: str, folder: str | None) -> Fitted:
    make_strategy, make_module = RUNS[name]
    counter = Counter()
    timeline = StepTimeline(folder) if folder is not None else None
    both = [] if timeline is None else [timeline, ClusterMonitor(folder, interval_s=0.02, heartbeat_s=0.02)]
    trainer = trainer_on_pool(context, make_strategy(), callbacks=[counter, *both], limit_val_batches=0)
    with pytest.MonkeyPatch.context() as patch:
        for owner in (torch.cuda, torch.accelerator, torch.cuda.Event):
            patch.setattr(owner, "synchronize", refuse)
        trainer.fit(make_module(context))
    dist.barrier() if dist.is_initialized() else None
    run = read_run(Path(folder)) if folder is not None and context.rank == 0 else None
    problem = timeline.capture.problem if timeline is not None and timeline.capture is not None else None
    return Fitted(counter.weights, counter.operations, run, problem)


def fit_twice(context: RankContext, name: str, folder: str) -> tuple[Fitted, Fitted]:
    return fit(context, name, None), fit(context, name, folder)


def check_step(step: StepRecord, name: str) -> None:
    assert sum(seconds or 0.0 for seconds in step.phases.values()) == pytest.approx(step.duration_s, rel=0.02)
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.DATA_WAIT):
        assert step.phases[phase], f"{phase} of step {step.step}"
    traffic = step.communication
    assert traffic is not None
    assert traffic.total_s > 0
    assert traffic.exposed_s == pytest.approx(step.phases[Phase.COMMUNICATION], abs=1e-9)
    for each in (traffic, *step.tiers.values()):
        assert 0 <= each.exposed_s <= each.total_s + 1e-9
    assert bool(step.phases[Phase.PIPELINE_IDLE]) == (name == "pipeline")


@pytest.mark.parametrize("name", sampled({name: (name,) for name in RUNS}, ["lightning ddp", "zero2", "pipeline"]))
def test_both_callbacks_record_and_training_is_what_it_was_to_the_bit(
    ranks: RankPool, name: str, tmp_path: Path
) -> None:
    fresh = name == "lightning fsdp2"  # its mesh leaves groups open
    found = ranks.run(fit_twice, world_size=2, args=(name, str(tmp_path / "monitor")), fresh=fresh)
    for plain, watched in found:
        assert watched.problem is None
        assert watched.operations == plain.operations > 0
        assert watched.weights.keys() == plain.weights.keys()
        assert all(torch.equal(value, plain.weights[key]) for key, value in watched.weights.items())
    run = found[0][1].run
    assert run is not None
    assert run.problems == ()
    assert sorted(run.ranks) == [0, 1]
    for rank in run.ranks.values():
        assert [step.step for step in rank.steps] == list(range(len(rank.steps)))
        assert len(rank.steps) >= BATCHES
        assert rank.spans
        assert rank.series("memory")
        for step in rank.steps[1:]:  # in the first one groups are made
            check_step(step, name)
    if name == "pipeline":
        sizes = {option: run.facts.options[f"parallel.pipeline.{option}"] for option in ("size", "micro_batches")}
        assert sizes == {"size": 2, "micro_batches": 4}


class Napping(OddModule):
    """Rank 1 gets its third batch late."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__(sgd)
        self._batches = batches

    def train_dataloader(self) -> Any:
        return loader_of(Late(self._batches) if self.global_rank == 1 else self._batches)

    def forward_hook(self, module: Any, args: Any, output: torch.Tensor) -> None:
        """Its backward takes its time, between the gradients of the later layers and those of the first."""
        output.register_hook(lambda gradient: time.sleep(NAP_S / 4))


class Late(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        if index == 2:
            time.sleep(NAP_S)
        return super().__getitem__(index)


def nap(context: RankContext, folder: str, ours: bool) -> RunRecord | None:
    buckets = {"bucket_cap_mb": 1e-4}  # several
    strategy = strategy_of() if ours else DDPStrategy(process_group_backend="gloo", **buckets)
    trainer = trainer_on_pool(context, strategy, callbacks=[StepTimeline(folder, spans_every=1)], limit_val_batches=0)
    module = Napping(make_batches(2, BATCHES)[context.rank])
    module.net[0].register_forward_hook(module.forward_hook)
    trainer.fit(module)
    dist.barrier() if dist.is_initialized() else None
    return read_run(Path(folder)) if context.rank == 0 else None


@pytest.mark.parametrize("ours", [pytest.param(True, id="ours"), pytest.param(False, id="ddp")])
def test_who_has_no_batch_waits_for_data_and_the_other_for_communication(
    ranks: RankPool, ours: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "monitor"
    run = ranks.run(nap, world_size=2, args=(str(folder), ours))[0]
    assert run is not None
    late, waiting = run.ranks[1].steps[2], run.ranks[0].steps[2]
    assert late.phases[Phase.DATA_WAIT] >= NAP_S  # type: ignore[operator]
    # It began to wait when it had computed its own gradients, at the latest when the other began to compute.
    assert waiting.phases[Phase.COMMUNICATION] >= NAP_S / 4  # type: ignore[operator]
    assert waiting.phases[Phase.DATA_WAIT] < NAP_S  # type: ignore[operator]
    for rank in run.ranks.values():
        assert all(step.phases[Phase.BACKWARD] >= NAP_S / 4 for step in rank.steps)  # type: ignore[operator]
        buckets = [span for span in rank.spans if span.name == "comm.reducer" and span.step == BATCHES - 1]
        assert len(buckets) == 0 if ours else len(buckets) >= 2
    shutil.rmtree(folder)
