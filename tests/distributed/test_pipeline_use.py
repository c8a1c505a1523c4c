"""What users do with a model that is cut into stages: evaluate, predict, log, stop early, save, load, go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from lightning_dist.errors import CombinationError, ConfigError, PlacementError
from tests.distributed.lightning_runs import loader_of, trainer_on_pool
from tests.distributed.pipeline_runs import (
    STEPS,
    StageCase,
    StageLearner,
    make_batches,
    strategy_for,
)
from tests.distributed.stage_use import (
    check_checkpoint,
    check_evaluation,
    check_state_in_fit,
    evaluate,
    fail_then_use,
    net_of,
    state_in_fit,
)
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

FOUR = StageCase(pipeline={"size": 4, "micro_batches": 4})
TWO = StageCase("gpt", pipeline={"size": 2, "micro_batches": 4}, optimizer="adamw")
HOSTS = {"a": [0, 1], "b": [2, 3]}


# -- evaluation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_evaluation_is_that_of_the_uncut_model(ranks: RankPool, schedule: str) -> None:
    case = StageCase("gpt", pipeline={"size": 2, "micro_batches": 4, "schedule": schedule})
    outcomes = ranks.run(evaluate, layout=HOSTS, args=(case,))
    check_evaluation(outcomes, case, data_ranks=(0, 0, 1, 1))


# -- logging, stopping, schedulers ------------------------------------------------------------------------------------


class Watched(StageLearner):
    """Logs in several ways, and lowers its rate on a plateau."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss = super().training_step(batch, batch_idx)
        samples = len(batch[0])
        self.log("samples", float(samples), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("largest", batch[0].max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log_dict({"first": batch[0][0, 0], "half": 0.5}, on_step=True, on_epoch=True, batch_size=samples)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", self.trainer.strategy.gradient_norm())  # type: ignore[attr-defined]


def watch(context: RankContext) -> dict[str, Any]:
    module = Watched(FOUR)
    stopping = EarlyStopping("val_loss", min_delta=1000.0, patience=2)
    trainer = trainer_on_pool(context, strategy_for(FOUR), max_epochs=10, callbacks=[stopping])
    trainer.fit(module)
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return {"epochs": trainer.current_epoch, "rate": rate, **{k: float(v) for k, v in trainer.callback_metrics.items()}}


def test_what_is_logged_and_decided_is_alike_on_all_ranks(ranks: RankPool) -> None:
    outcomes = ranks.run(watch, layout=HOSTS)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    batches = FOUR.batches(0)
    assert outcomes[0]["epochs"] == 3
    assert outcomes[0]["rate"] == pytest.approx(0.1 / 8)
    assert outcomes[0]["samples"] == 8 * STEPS
    assert outcomes[0]["largest"] == pytest.approx(max(float(inputs.max()) for inputs, _ in batches))
    firsts = [float(inputs[::2, 0].mean()) for inputs, _ in batches]  # of micro-batches of two samples
    assert outcomes[0]["first_epoch"] == pytest.approx(sum(firsts) / len(firsts), rel=1e-5)
    assert outcomes[0]["half_epoch"] == 0.5


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [(None, None), (None, "ddp"), ("ddp", None)],
    ids=["pipeline-pipeline", "pipeline-ddp", "ddp-pipeline"],
)
def test_a_checkpoint_is_that_of_the_uncut_model(
    ranks: RankPool, first: str | None, second: str | None, tmp_path: Path
) -> None:
    """Two pipelines of two and two ranks of ddp read the same parts of the data."""
    layouts = {None: HOSTS, "ddp": {"a": [0, 1]}}
    check_checkpoint(ranks, TWO, tmp_path, first=first, second=second, layouts=layouts)


def test_state_dict_is_whole_while_the_model_is_cut(ranks: RankPool) -> None:
    check_state_in_fit(ranks.run(state_in_fit, layout=HOSTS, args=(FOUR,)), FOUR, most=1.3)


# -- alone, and refused ------------------------------------------------------------------------------------------------


def fit(context: RankContext, case: StageCase, arguments: dict[str, Any]) -> dict[str, Tensor]:
    module = arguments.pop("module", StageLearner)(case)
    trainer = trainer_on_pool(context, strategy_for(case), limit_val_batches=0, **arguments)
    trainer.fit(module)
    return {name: value.clone() for name, value in module.net.state_dict().items()}


def test_one_rank_trains_the_uncut_model(ranks: RankPool) -> None:
    case = StageCase(pipeline={"micro_batches": 4})
    assert ranks.run(fit, world_size=1, args=(case, {}))[0].keys() == net_of(case).state_dict().keys()


class ByHand(StageLearner):
    def __init__(self, case: StageCase) -> None:
        super().__init__(case)
        self.automatic_optimization = False


class Silent(StageLearner):
    pipeline_layers = None  # type: ignore[assignment]


class Twice(StageLearner):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).mean() + self.net(batch[0]).sum()


class Never(StageLearner):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[0].mean()


class Otherwise(StageLearner):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0] * 2).mean()


class Skips(StageLearner):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.net(batch[0])


class OwnData(StageLearner):
    def train_dataloader(self) -> Any:
        return loader_of(make_batches("odd", STEPS, seed=self.trainer.global_rank, size=8))


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "manual": ({"module": ByHand}, CombinationError, "manual optimization"),
    "layers": ({"module": Silent}, ConfigError, "does not say how it splits into pipeline stages"),
    "twice": ({"module": Twice}, ConfigError, "calls self.net more than once"),
    "never": ({"module": Never}, ConfigError, "does not call self.net"),
    "otherwise": ({"module": Otherwise}, ConfigError, "with other values than the pipeline's first stage"),
    "skips": ({"module": Skips}, ConfigError, "no batch can be skipped"),
    "data": ({"module": OwnData}, ConfigError, "must read the same batches"),
}


@pytest.mark.parametrize(("arguments", "kind", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_by_name(
    ranks: RankPool, arguments: dict[str, Any], kind: type[Exception], said: str
) -> None:
    case = StageCase(pipeline={"size": 2, "micro_batches": 4})
    ranks.run(expect, world_size=2, args=(case, arguments, kind, said))


def expect(context: RankContext, case: StageCase, arguments: dict[str, Any], kind: type[Exception], said: str) -> None:
    """Each rank either says it, or that the other did."""
    with pytest.raises(Exception) as caught:  # of two kinds
        fit(context, case, arguments)
    assert said in str(caught.value), repr(caught.value)
    if context.rank == 1 or "Collective" not in type(caught.value).__name__:
        assert isinstance(caught.value, kind | RuntimeError)


def test_ranks_that_make_no_pipelines_are_refused(ranks: RankPool) -> None:
    ranks.run(refused_size, world_size=3)


def refused_size(context: RankContext) -> None:
    with pytest.raises(PlacementError, match=r"3 ranks do not make pipelines of 2; write parallel.pipeline.size=3"):
        fit(context, StageCase(pipeline={"size": 2}), {})


def test_a_failed_fit_leaves_no_wrong_weights(ranks: RankPool) -> None:
    ranks.run(fail_then_use, layout=HOSTS, args=(FOUR,))
