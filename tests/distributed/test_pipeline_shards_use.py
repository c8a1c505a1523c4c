"""What users do with stages that are sharded: evaluate, save, load, freeze; what is kept, and what is refused."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_dist.errors import CombinationError
from tests.distributed.lightning_runs import loader_of, trainer_on_pool
from tests.distributed.pipeline_runs import (
    STEPS,
    StageCase,
    StageLearner,
    make_batches,
    reference,
    strategy_for,
    train,
)
from tests.distributed.stage_use import check_checkpoint, check_evaluation, evaluate, fail_then_use, net_of
from tests.distributed.test_pipeline_shards import ZERO1, ZERO2, pipe
from tests.distributed.test_pipeline_training import BY_NORM, LAYOUTS, check
from tests.support.ranks import RankPool
from tests.support.reference import assert_same
from tests.support.tasks import RankContext

HOSTS = LAYOUTS["2+2"]
CROSSED = {"a": [0, 3], "b": [1, 2]}  # a stage's ranks, in the order of pipelines, are not in that of their numbers
TIED = StageCase("gpt", pipeline=pipe(), parallel=ZERO2, optimizer="adamw")
ODD = StageCase(pipeline=pipe(), parallel=ZERO2)


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_shards_of_tied_weights_meet_though_ranks_are_crossed(ranks: RankPool) -> None:
    case = dataclasses.replace(TIED, accumulation=3, trainer=BY_NORM)
    check(ranks.run(train, layout=CROSSED, args=(case,)), case)


@pytest.mark.parametrize(
    "schedule", [*(pytest.param(name, marks=pytest.mark.sweep) for name in ("1f1b", "interleaved_zero_bubble")), "zbv"]
)
def test_recomputation_changes_nothing(ranks: RankPool, schedule: str) -> None:
    case = StageCase("noisy", pipeline=pipe(schedule), parallel=ZERO2)
    plain = ranks.run(train, layout=HOSTS, args=(case,))
    again = ranks.run(train, layout=HOSTS, args=(dataclasses.replace(case, strategy={"recompute": "full"}),))
    assert again[0].losses == plain[0].losses
    assert_same(again[0].weights, plain[0].weights, atol=0)


def test_batch_norm_follows_the_first_pipeline(ranks: RankPool) -> None:
    case = StageCase("batch_norm", pipeline=pipe(), parallel=ZERO2)
    sharded = ranks.run(train, layout=HOSTS, args=(case,))
    whole = ranks.run(train, layout=HOSTS, args=(dataclasses.replace(case, parallel={}),))
    for one, other in zip(sharded, whole, strict=True):
        assert_same(one.weights, other.weights, atol=1e-6)


@pytest.mark.parametrize(("precision", "options"), [("bf16-mixed", {}), ("bf16-true", {"reduce_dtype": "fp32"})])
def test_lower_precisions(ranks: RankPool, precision: str, options: dict[str, Any]) -> None:
    case = dataclasses.replace(TIED, trainer={"precision": precision}, parallel={**ZERO2, **options})
    outcomes = ranks.run(train, layout=HOSTS, args=(case,))
    losses = [sum(each) / 2 for step in reference(case, 2) for each in step.rank_losses]
    assert outcomes[0].losses == pytest.approx(losses, rel=0.02)  # bf16 has 8 bits


def test_shards_need_ranks_that_hold_the_same_stage(ranks: RankPool) -> None:
    case = dataclasses.replace(ODD, pipeline=pipe(size=4))
    check(ranks.run(train, layout=LAYOUTS["4"], args=(case,)), case)


# -- what is kept -----------------------------------------------------------------------------------------------------


def count_state(context: RankContext, case: StageCase) -> dict[str, int]:
    """Bytes of what the optimizer keeps, and of gradients, on this rank."""
    said: dict[str, int] = {}

    def local(tensor: Tensor) -> int:
        own: Tensor = getattr(tensor, "_local_tensor", tensor)
        return own.numel() * own.element_size()

    class Count(pl.Callback):
        def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            said["gradients"] = max(said.get("gradients", 0), sum(map(local, gradients)))

        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            states = trainer.optimizers[0].state.values()
            said["optimizer"] = sum(local(v) for s in states for v in s.values() if isinstance(v, Tensor) and v.dim())
            said["parameters"] = sum(local(p) for p in pl_module.parameters() if p.untyped_storage().nbytes() > 4)

    trainer = trainer_on_pool(context, strategy_for(case), limit_val_batches=0, callbacks=[Count()])
    trainer.fit(StageLearner(case))
    return said


@pytest.mark.parametrize("mode", ["zero1", "zero2"])
def test_each_rank_keeps_its_shards_of_its_stages(ranks: RankPool, mode: str) -> None:
    case = dataclasses.replace(ODD, parallel={"mode": mode}, optimizer="adamw")
    said = ranks.run(count_state, layout=HOSTS, args=(case,))
    size = sum(p.numel() * p.element_size() for p in net_of(case).parameters())
    assert sum(each["optimizer"] for each in said) == 2 * size, "two moments, each value once in the world"
    assert sum(each["parameters"] for each in said) == size


class Watches(StageLearner):
    """Backward of the first layer stands still at the last micro-batch until a sum is done: overlap lets it go on."""

    def __init__(self, case: StageCase) -> None:
        super().__init__(case)
        self.gradients = 0
        self.done: list[bool] = []
        self.net[0].register_forward_hook(self.watch)

    def watch(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self.wait)

    def wait(self, gradient: Tensor) -> None:
        self.gradients += 1
        if self.gradients % 4 == 0:
            end = time.monotonic() + 10
            while not (done := self.has_summed()) and time.monotonic() < end:
                time.sleep(0.005)
            self.done.append(done)

    def has_summed(self) -> bool:
        events = self.trainer.strategy.events.snapshot()  # type: ignore[attr-defined]
        return any(event.name.startswith("comm.scatter_") for event in events)


def train_watched(context: RankContext) -> list[bool]:
    case = StageCase(pipeline=pipe("interleaved_1f1b"), parallel=ZERO2)
    module = Watches(case)
    trainer_on_pool(context, strategy_for(case), limit_val_batches=0, limit_train_batches=1).fit(module)
    return module.done


def test_sums_of_a_stage_do_not_wait_for_the_others(ranks: RankPool) -> None:
    """On the ranks that have the first and the third stage, the third's are summed before the first is done."""
    assert [done for done in ranks.run(train_watched, layout=HOSTS) if done] == [[True], [True]]


class Shorter(StageLearner):
    """The second pipeline's batches have one or two samples, so that it goes by another schedule than the first."""

    def train_dataloader(self) -> Any:
        rank = int(self.trainer.distributed_sampler_kwargs["rank"])
        own = [make_batches("odd", 1, seed=10 * rank + i, size=8 if rank == 0 else 1 + i % 2)[0] for i in range(STEPS)]
        return loader_of(own)


def fit_shorter(context: RankContext, schedule: str, parallel: dict[str, Any]) -> dict[str, Tensor]:
    case = StageCase(pipeline=pipe(schedule), parallel=parallel)
    module = Shorter(case)
    trainer_on_pool(context, strategy_for(case), limit_val_batches=0).fit(module)
    return {name: value.clone() for name, value in module.net.state_dict().items()}


@pytest.mark.parametrize(
    "schedule",
    ["interleaved_1f1b", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("interleaved_zero_bubble", "zbv"))],
)
def test_pipelines_of_other_schedules_do_not_wait_in_a_circle(ranks: RankPool, schedule: str) -> None:
    expected = ranks.run(fit_shorter, layout=HOSTS, args=(schedule, {}))[0]
    for weights in ranks.run(fit_shorter, layout=HOSTS, args=(schedule, ZERO2)):
        assert_same(weights, expected, atol=1e-6)


def three_ties() -> nn.Sequential:
    """Under interleaved_1f1b two of the three layers with one weight sit on the first rank, and one on the second."""
    net = nn.Sequential(*(nn.Linear(7, 7) for _ in range(4)), nn.Linear(7, 3))
    net[2].weight = net[3].weight = net[0].weight
    return net


def fit_tied(context: RankContext, parallel: dict[str, Any]) -> dict[str, Tensor]:
    case = StageCase(pipeline=pipe("interleaved_1f1b", split=[1, 1, 1, 2]), parallel=parallel)
    module = StageLearner(case)
    torch.manual_seed(0)
    module.net = three_ties()
    trainer_on_pool(context, strategy_for(case), limit_val_batches=0).fit(module)
    return {name: value.clone() for name, value in module.net.state_dict().items()}


def test_a_weight_that_cannot_be_sharded_on_one_rank_is_whole_on_all(ranks: RankPool) -> None:
    expected = ranks.run(fit_tied, layout=HOSTS, args=({},))[0]
    for weights in ranks.run(fit_tied, layout=HOSTS, args=(ZERO2,)):
        assert_same(weights, expected, atol=1e-6)


# -- users ------------------------------------------------------------------------------------------------------------


class Uneven(StageLearner):
    """Its second pipeline has fewer batches to validate."""

    def val_dataloader(self) -> Any:
        rank = int(self.trainer.distributed_sampler_kwargs["rank"])
        return loader_of(make_batches(self.case.model, 3 - 2 * rank, seed=50 + rank, size=3))


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zbv", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("mode", [pytest.param("zero1", marks=pytest.mark.sweep), "zero2"])
def test_evaluation_is_that_of_the_uncut_model(ranks: RankPool, schedule: str, mode: str) -> None:
    case = dataclasses.replace(TIED, pipeline=pipe(schedule), parallel={"mode": mode})
    outcomes = ranks.run(evaluate, layout=HOSTS, args=(case,))
    check_evaluation(outcomes, case, data_ranks=(0, 0, 1, 1))


def fit_uneven(context: RankContext) -> dict[str, Tensor]:
    module = Uneven(dataclasses.replace(TIED, accumulation=2))
    trainer = trainer_on_pool(
        context, strategy_for(module.case), accumulate_grad_batches=2, val_check_interval=3, num_sanity_val_steps=1
    )
    trainer.fit(module)
    return {name: value.clone() for name, value in module.net.state_dict().items()}


def test_pipelines_may_differ_in_what_they_validate(ranks: RankPool) -> None:
    case = dataclasses.replace(TIED, accumulation=2)
    for weights in ranks.run(fit_uneven, layout=HOSTS):
        assert_same(weights, reference(case, 2)[-1].weights, atol=1e-6)


@pytest.mark.parametrize(
    ("first", "second"),
    [(None, None), (None, "ddp"), ("ddp", None), (None, "zero2")],
    ids=["stages-stages", "stages-ddp", "ddp-stages", "stages-zero2"],
)
@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.sweep), "zbv"])
def test_a_checkpoint_is_that_of_the_uncut_model(
    ranks: RankPool, first: str | None, second: str | None, schedule: str, tmp_path: Path
) -> None:
    """Two pipelines of two, and two ranks of the other modes, read the same parts of the data."""
    case = dataclasses.replace(TIED, pipeline=pipe(schedule))
    pair = {"a": [0, 1]}
    layouts = {None: HOSTS, "ddp": pair, "zero2": pair}
    check_checkpoint(ranks, case, tmp_path, first=first, second=second, layouts=layouts)


def state_in_fit(context: RankContext, mode: str) -> dict[str, Any]:
    """What ``state_dict`` gives inside a window of accumulation, and what loading at the end does."""
    said: dict[str, Any] = {"inside": []}

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            said["inside"].append({name: value.clone() for name, value in pl_module.net.state_dict().items()})

        def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            pl_module.net.load_state_dict({name: value * 2 for name, value in said["inside"][-1].items()})

    case = dataclasses.replace(TIED, parallel={"mode": mode}, accumulation=2)
    module = StageLearner(case)
    trainer = trainer_on_pool(context, strategy_for(case), callbacks=[Look()], accumulate_grad_batches=2)
    trainer.fit(module)
    said["after"] = {name: value.clone() for name, value in module.net.state_dict().items()}
    return said


@pytest.mark.parametrize("mode", ["zero1", pytest.param("zero2", marks=pytest.mark.sweep)])
def test_state_dict_is_whole_while_stages_are_sharded(ranks: RankPool, mode: str) -> None:
    steps = reference(dataclasses.replace(TIED, accumulation=2), 2)
    for outcome in ranks.run(state_in_fit, layout=HOSTS, args=(mode,)):
        for step in range(STEPS):
            assert_same(outcome["inside"][2 * step + 1], steps[step].weights, atol=1e-6)
        for step in range(1, STEPS):
            assert_same(outcome["inside"][2 * step], steps[step - 1].weights, atol=1e-6)
        for name, value in outcome["inside"][-1].items():
            assert torch.equal(outcome["after"][name], 2 * value)


class Normed(StageLearner):
    """Logs norms; what its loss is scaled by belongs to no layer, has no dimension, and stays whole."""

    def __init__(self, case: StageCase) -> None:
        super().__init__(case)
        self.scale = nn.Parameter(torch.ones(()))
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.scale

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(self.trainer.strategy.gradient_norm()))  # type: ignore[attr-defined]
        own = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("own", torch.stack(own).norm())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit_normed(context: RankContext, schedule: str, parallel: dict[str, Any]) -> Any:
    case = StageCase("gpt", pipeline=pipe(schedule), parallel=parallel)
    module = Normed(case)
    trainer_on_pool(context, strategy_for(case), limit_val_batches=0).fit(module)
    return module.norms, {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.sweep), "zbv"])
def test_norms_and_what_stays_whole(ranks: RankPool, schedule: str) -> None:
    expected = ranks.run(fit_normed, layout=HOSTS, args=(schedule, {}))[0]
    for norms, weights in ranks.run(fit_normed, layout=HOSTS, args=(schedule, ZERO2)):
        assert norms == pytest.approx(expected[0], rel=1e-5)
        assert_same(weights, expected[1], atol=1e-6)
    assert float(expected[1]["scale"]) != 1.0


class Thaws(StageLearner):
    """Its first layers train from the second half of the steps on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for layer in (self.net[0], self.net[6]):
            layer.requires_grad_(batch_idx >= STEPS // 2)


def fit_thawing(context: RankContext, parallel: dict[str, Any]) -> dict[str, Tensor]:
    case = StageCase(pipeline=pipe(), parallel=parallel)
    module = Thaws(case)
    trainer_on_pool(context, strategy_for(case), limit_val_batches=0).fit(module)
    return {name: value.clone() for name, value in module.net.state_dict().items()}


@pytest.mark.parametrize("parallel", [pytest.param(ZERO1, marks=pytest.mark.sweep), ZERO2], ids=["zero1", "zero2"])
def test_layers_may_thaw(ranks: RankPool, parallel: dict[str, Any]) -> None:
    expected = ranks.run(fit_thawing, layout=HOSTS, args=({},))[0]
    for weights in ranks.run(fit_thawing, layout=HOSTS, args=(parallel,)):
        assert_same(weights, expected, atol=1e-6)


class Lazy(StageLearner):
    """Only the first pipeline uses a part of its first layer."""

    def __init__(self, case: StageCase) -> None:
        super().__init__(case)
        self.net = nn.Sequential(SometimesTwice(self), *list(self.net)[1:])


class SometimesTwice(nn.Module):
    def __init__(self, learner: StageLearner) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(7, 13), nn.Linear(7, 13)
        self.first = [learner]

    def forward(self, x: Tensor) -> Tensor:
        uses = int(self.first[0].trainer.distributed_sampler_kwargs["rank"]) == 0
        return self.one(x) + self.other(x) if uses else self.one(x)


def fit_lazy(context: RankContext, parallel: dict[str, Any], finds: bool) -> dict[str, Tensor]:
    case = StageCase(pipeline=pipe(), parallel={**parallel, "find_unused_parameters": finds}, accumulation=2)
    module = Lazy(case)
    trainer_on_pool(context, strategy_for(case), limit_val_batches=0, accumulate_grad_batches=2).fit(module)
    return {name: value.clone() for name, value in module.net.state_dict().items()}


@pytest.mark.parametrize("parallel", [pytest.param(ZERO1, marks=pytest.mark.sweep), ZERO2], ids=["zero1", "zero2"])
def test_unused_parameters_are_found(ranks: RankPool, parallel: dict[str, Any]) -> None:
    expected = ranks.run(fit_lazy, layout=HOSTS, args=({}, True))[0]
    for weights in ranks.run(fit_lazy, layout=HOSTS, args=(parallel, True)):
        assert_same(weights, expected, atol=1e-6)


def test_a_failed_fit_leaves_no_wrong_weights(ranks: RankPool) -> None:
    ranks.run(fail_then_use, layout=HOSTS, args=(ODD,))


# -- refused ----------------------------------------------------------------------------------------------------------

REFUSED = {
    "zero3": ({"mode": "zero3"}, "write parallel=zero2 with that size"),
    "hsdp": ({"mode": "hsdp"}, "write parallel=zero2 with that size"),
    "gather_dtype": ({**ZERO2, "gather_dtype": "bf16"}, "write parallel.gather_dtype=same"),
    "cpu_offload": ({**ZERO1, "cpu_offload": True}, "write parallel.cpu_offload=false"),
}


@pytest.mark.parametrize(("parallel", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_right_is_refused_by_name(parallel: dict[str, Any], said: str) -> None:
    with pytest.raises(CombinationError, match=said):
        strategy_for(StageCase(pipeline={"size": 2}, parallel=parallel))
