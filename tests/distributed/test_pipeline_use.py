"""What users do with a model that is cut into stages: evaluate, predict, log, stop early, save, load, go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor

from lightning_dist.errors import CombinationError, ConfigError, LostWeightsError, PlacementError
from tests.distributed.lightning_runs import loader_of, strategy_of, trainer_on_pool
from tests.distributed.pipeline_runs import (
    STEPS,
    StageCase,
    StageLearner,
    input_of,
    loss_of,
    make_batches,
    strategy_for,
)
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

FOUR = StageCase(pipeline={"size": 4, "micro_batches": 4})
TWO = StageCase("gpt", pipeline={"size": 2, "micro_batches": 4}, optimizer="adamw")
HOSTS = {"a": [0, 1], "b": [2, 3]}


def net_of(case: StageCase, weights: dict[str, Tensor] | None = None) -> torch.nn.Module:
    net = StageLearner(case).net
    if weights is not None:
        net.load_state_dict(weights)
    return net


# -- evaluation -------------------------------------------------------------------------------------------------------


def evaluate(context: RankContext, case: StageCase) -> dict[str, Any]:
    module = StageLearner(case)
    trainer = trainer_on_pool(context, strategy_for(case))
    said: dict[str, Any] = {"before": trainer.validate(module, verbose=False)[0]["val_loss"]}
    said["predictions"] = trainer.predict(module)
    said["rank"] = context.rank
    trainer.fit(module)
    said["in_fit"] = float(trainer.callback_metrics["val_loss"])
    said["after"] = trainer.test(module, verbose=False)[0]["val_loss"]
    said["weights"] = {name: value.clone() for name, value in module.net.state_dict().items()}
    return said


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_evaluation_is_that_of_the_uncut_model(ranks: RankPool, schedule: str) -> None:
    case = StageCase("gpt", pipeline={"size": 2, "micro_batches": 4, "schedule": schedule})
    outcomes = ranks.run(evaluate, layout=HOSTS, args=(case,))
    net, trained = net_of(case).eval(), net_of(case, outcomes[0]["weights"]).eval()
    batches = {rank: make_batches("gpt", 2, seed=50 + rank, size=3) for rank in (0, 1)}

    @torch.no_grad()
    def mean_loss(model: torch.nn.Module) -> float:
        losses = [loss_of(case, model(input_of(case, b)), b) for rank in batches for b in batches[rank]]
        return float(torch.stack(losses).mean())

    for outcome in outcomes:
        assert outcome["before"] == pytest.approx(mean_loss(net), rel=1e-5)
        assert outcome["in_fit"] == outcome["after"] == pytest.approx(mean_loss(trained), rel=1e-5)
    for outcome, data_rank in zip(outcomes, (0, 0, 1, 1), strict=True):
        expected = [net(input_of(case, batch)).detach() for batch in batches[data_rank]]
        torch.testing.assert_close(outcome["predictions"], expected)


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


def losses_of(module: StageLearner) -> list[float]:
    return [each["loss"] for each in module.seen]


def train_and_save(context: RankContext, case: StageCase, parallel: Any, folder: Path) -> list[float]:
    """Two epochs; a checkpoint after the first."""
    module = StageLearner(case)
    strategy = strategy_for(case) if parallel is None else strategy_of(parallel=parallel)
    saving = ModelCheckpoint(folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
    trainer = trainer_on_pool(
        context, strategy, max_epochs=2, limit_val_batches=0, callbacks=[saving], enable_checkpointing=True
    )
    trainer.fit(module)
    return losses_of(module)[STEPS:]


def go_on(context: RankContext, case: StageCase, parallel: Any, path: Path) -> list[float]:
    module = StageLearner(case)
    strategy = strategy_for(case) if parallel is None else strategy_of(parallel=parallel)
    trainer = trainer_on_pool(context, strategy, max_epochs=2, limit_val_batches=0)
    trainer.fit(module, ckpt_path=path)
    return losses_of(module)


@pytest.mark.parametrize(
    ("first", "second"),
    [(None, None), (None, "ddp"), ("ddp", None)],
    ids=["pipeline-pipeline", "pipeline-ddp", "ddp-pipeline"],
)
def test_a_checkpoint_is_that_of_the_uncut_model(
    ranks: RankPool, first: str | None, second: str | None, tmp_path: Path
) -> None:
    """Two pipelines of two and two ranks of ddp read the same parts of the data."""
    case, layouts = TWO, {None: HOSTS, "ddp": {"a": [0, 1]}}
    expected = ranks.run(train_and_save, layout=layouts[first], args=(case, first, tmp_path))
    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    names = [f"net.{name}" for name, _ in net_of(case).named_parameters(remove_duplicate=False)]
    assert list(saved["state_dict"]) == names
    tied = [saved["state_dict"][f"net.{name}.weight"] for name in ("tokens", "head")]
    assert tied[0].data_ptr() == tied[1].data_ptr()
    found = ranks.run(go_on, layout=layouts[second], args=(case, second, tmp_path / "epoch=0.ckpt"))
    mean = torch.tensor(found).mean(0)  # under ddp each rank has the loss of its own part
    torch.testing.assert_close(mean, torch.tensor(expected).mean(0), rtol=1e-5, atol=1e-6)


def state_in_fit(context: RankContext) -> dict[str, Any]:
    """What ``state_dict`` of an inner module gives while the model is cut, and what loading does."""
    said: dict[str, Any] = {}

    class Look(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            said["inner"] = {name: value.clone() for name, value in pl_module.net.state_dict().items()}  # type: ignore[union-attr]
            doubled = {name: value * 2 for name, value in said["inner"].items()}
            pl_module.net.load_state_dict(doubled)  # type: ignore[union-attr]
            said["memory"] = sum(p.untyped_storage().nbytes() for p in set(pl_module.parameters()))

    module = StageLearner(FOUR)
    trainer = trainer_on_pool(context, strategy_for(FOUR), callbacks=[Look()])
    trainer.fit(module)
    said["after"] = {name: value.clone() for name, value in module.net.state_dict().items()}
    return said


def test_state_dict_is_whole_while_the_model_is_cut(ranks: RankPool) -> None:
    outcomes = ranks.run(state_in_fit, layout=HOSTS)
    net = net_of(FOUR)
    size = sum(p.numel() * p.element_size() for p in net.parameters())
    for outcome in outcomes:
        for name, value in outcomes[0]["inner"].items():
            assert torch.equal(outcome["inner"][name], value)
            assert torch.equal(outcome["after"][name], 2 * value)
    assert sum(outcome["memory"] for outcome in outcomes) < 1.3 * size, "a rank holds its stages only"


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


def fail_then_use(context: RankContext) -> None:
    class Fails(StageLearner):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 1:
                raise ValueError("no more")
            return super().training_step(batch, batch_idx)

    module = Fails(FOUR)
    trainer = trainer_on_pool(context, strategy_for(FOUR), limit_val_batches=0)
    with pytest.raises((ValueError, RuntimeError), match="no more"):
        trainer.fit(module)
    with pytest.raises(LostWeightsError, match="weights of this"):
        module.net(torch.zeros(2, 7))


def test_a_failed_fit_leaves_no_wrong_weights(ranks: RankPool) -> None:
    ranks.run(fail_then_use, layout=HOSTS)
