"""The Trainer's functions in any order, and what users add to a Trainer, against Lightning's ddp in the same run."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.tuner import Tuner
from omegaconf import OmegaConf
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn

from tests.distributed.compared import Pair, Trained, check_equal, fit_both, strategies
from tests.distributed.lightning_runs import (
    OddModule,
    loader_of,
    make_batches,
    mse,
    odd_model,
    sgd,
    strategy_of,
    trainer_on_pool,
)
from tests.support.ranks import RankPool
from tests.support.reference import assert_same, train_reference
from tests.support.tasks import RankContext

BATCHES = 5


def normalised_model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(7, width), nn.BatchNorm1d(width), nn.Linear(width, 3))


class Stages(OddModule):
    """Logs in every stage; BatchNorm makes training and evaluation differ."""

    def __init__(self, width: int = 7) -> None:
        super().__init__(sgd, make_model=partial(normalised_model, width))
        self.save_hyperparameters()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", mse(self.net, batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])  # type: ignore[no-any-return]


def loaders(context: RankContext, seed: int = 1) -> Any:
    return loader_of(make_batches(context.world_size, BATCHES, seed=seed)[context.rank])


def any_order(context: RankContext, make_strategy: Callable[[], Strategy], path: Path) -> dict[str, Any]:
    """Validate, fit, validate, test, save, fit on, predict; then load the file as users do."""
    module, strategy = Stages(), make_strategy()
    trainer = trainer_on_pool(context, strategy, max_epochs=1, num_sanity_val_steps=2)
    train, val = loaders(context), loaders(context, seed=2)
    values = [trainer.validate(module, val, verbose=False)[0]["val_loss"]]
    trainer.fit(module, train, val)
    values += [trainer.validate(module, val, verbose=False)[0]["val_loss"]]
    values += [trainer.test(module, val, verbose=False)[0]["test_loss"]]
    trainer.save_checkpoint(path)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, train, val)
    predictions = trainer.predict(module, val)
    assert predictions is not None
    loaded = Stages.load_from_checkpoint(path)
    resumed, uninterrupted = Stages(), Stages()
    again = trainer_on_pool(context, make_strategy(), max_epochs=2)
    again.fit(resumed, train, val, ckpt_path=path)
    trainer_on_pool(context, make_strategy(), max_epochs=2).fit(uninterrupted, train, val)
    return {
        "values": torch.tensor(values),
        "predictions": torch.stack(predictions),  # type: ignore[arg-type]
        "final": Trained.of(trainer, module).weights,
        "loaded": loaded.state_dict(),
        "resumed": Trained.of(again, resumed).weights,
        "uninterrupted": Trained.of(again, uninterrupted).weights,
        "steps": [trainer.global_step, again.global_step],
        "group": dict(strategy.distributed_sampler_kwargs),
    }


def any_order_both(context: RankContext) -> list[dict[str, Any]]:
    return [any_order(context, lambda i=i: strategies()[i], context.tmp_path / f"{i}.ckpt") for i in (0, 1)]  # type: ignore[misc]


@pytest.mark.parametrize("world_size", [1, 2])
def test_any_order_in_one_process(ranks: RankPool, world_size: int) -> None:
    for ours, ddp in ranks.run(any_order_both, world_size=world_size):
        assert_same(ours, ddp, atol=1e-6)
        assert_same(ours["resumed"], ours["uninterrupted"], atol=1e-6)
        assert ours["steps"] == [2 * BATCHES, 2 * BATCHES]


SCHEDULES = {
    "step": lambda o, t: {"scheduler": torch.optim.lr_scheduler.ExponentialLR(o, 0.9), "interval": "step"},
    "every 2 steps": lambda o, t: {
        "scheduler": torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        "interval": "step",
        "frequency": 2,
    },
    "epoch": lambda o, t: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    "one cycle": lambda o, t: {
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=t.estimated_stepping_batches),
        "interval": "step",
    },
    "plateau": lambda o, t: {
        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.3, patience=0, threshold=10.0),
        "monitor": "val_loss",
    },
    "plateau by step": lambda o, t: {
        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.3, patience=1, threshold=10.0),
        "monitor": "train_loss",
        "interval": "step",
        "strict": True,
    },
}


class Scheduled(OddModule):
    def __init__(self, schedule: str) -> None:
        super().__init__(sgd)
        self.schedule = schedule

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(self.optimizers().param_groups[0]["lr"])
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": SCHEDULES[self.schedule](optimizer, self.trainer)}


def train_scheduled(context: RankContext) -> dict[str, Pair]:
    both = {"train_dataloaders": loaders(context), "val_dataloaders": loaders(context, seed=2)}
    arguments: dict[str, Any] = {"max_epochs": 3, "accumulate_grad_batches": 2}
    return {name: fit_both(context, partial(Scheduled, name), lambda: both, **arguments) for name in SCHEDULES}


def test_learning_rates_of_every_interval_equal_ddp(ranks: RankPool) -> None:
    got = ranks.run(train_scheduled, world_size=2)
    for schedule in SCHEDULES:
        pairs = [by_schedule[schedule] for by_schedule in got]
        check_equal(pairs)
        assert len(set(pairs[0].ours.losses[1::2])) > 1, f"{schedule}: the rate has changed"


class EMA(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(avg_fn=get_ema_avg_fn(0.5))


class Stop(EarlyStopping):
    """Stops by what all ranks see, after a few epochs of this data."""

    def __init__(self) -> None:
        super().__init__("val_loss", patience=0, min_delta=10.0)


CALLBACKS: dict[str, Any] = {
    "ema": lambda: [EMA()],
    "swa": lambda: [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)],
    "early stopping": lambda: [Stop()],
}


def train_with_callbacks(context: RankContext) -> dict[str, Pair]:
    both = {"train_dataloaders": loaders(context), "val_dataloaders": loaders(context, seed=2)}
    return {
        name: fit_both(context, lambda: OddModule(sgd), lambda: both, make_callbacks=make, max_epochs=4)
        for name, make in CALLBACKS.items()
    }


def average_with_buffers(context: RankContext) -> Pair:
    both = {"train_dataloaders": loaders(context), "val_dataloaders": loaders(context, seed=2)}
    return fit_both(context, Stages, lambda: both, make_callbacks=lambda: [EMA()], max_epochs=2, num_sanity_val_steps=1)


def test_averaged_buffers_are_validated_as_under_ddp(ranks: RankPool) -> None:
    """Each rank averages statistics of its own; what is validated is rank 0's."""
    check_equal(ranks.run(average_with_buffers, world_size=2), weights_alike=False)


def test_callbacks_equal_ddp(ranks: RankPool) -> None:
    got = ranks.run(train_with_callbacks, world_size=2)
    for name in CALLBACKS:
        check_equal([by_name[name] for by_name in got])
    assert got[0]["early stopping"].ours.global_step == 2 * BATCHES


class Finetuned(OddModule):
    """The first layer is the backbone; it is frozen at first."""

    def __init__(self) -> None:
        super().__init__(sgd)
        self.backbone = self.net[0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class FreezeLater(Callback):
    """The other way round: the backbone is trained in the first epoch only."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.get_submodule("backbone").requires_grad_(trainer.current_epoch == 0)


def finetune(context: RankContext, frozen_first: bool) -> dict[str, torch.Tensor]:
    module = Finetuned()
    unfreeze = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.0, backbone_initial_lr=0.1)
    callbacks = [unfreeze if frozen_first else FreezeLater()]
    trainer_on_pool(context, strategy_of(), max_epochs=3, callbacks=callbacks).fit(module, loaders(context))
    return module.net.state_dict()


def plain_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def model_after(epochs: int, start: dict[str, torch.Tensor] | None, *, frozen: bool) -> dict[str, torch.Tensor]:
    """The weights after some epochs in one process, with the first layer frozen or not."""

    def make_model() -> nn.Module:
        model = odd_model()
        if start is not None:
            model.load_state_dict(start)
        model[0].requires_grad_(not frozen)
        return model

    batches = [of_rank * epochs for of_rank in make_batches(2, BATCHES)]
    steps = train_reference(make_model=make_model, make_optimizer=plain_sgd, batches=batches, loss_of=mse)
    return steps[-1].weights


@pytest.mark.parametrize("frozen_first", [True, False], ids=["unfrozen", "frozen"])
def test_parameters_unfrozen_or_frozen_later(ranks: RankPool, frozen_first: bool) -> None:
    """Against one process: Lightning's ddp does not synchronise the former, and fails on the latter."""
    expected = model_after(2, model_after(1, None, frozen=frozen_first), frozen=not frozen_first)
    for weights in ranks.run(finetune, world_size=2, args=(frozen_first,)):
        assert_same(weights, expected, atol=1e-6)


def log_with(context: RankContext, strategy: Strategy, folder: Path) -> list[str]:
    torch.manual_seed(0)
    made = [CSVLogger(folder, name="csv"), TensorBoardLogger(folder, name="tb")]
    callbacks = [
        LearningRateMonitor("step"),
        ModelCheckpoint(dirpath=folder / "best", monitor="val_loss", save_top_k=1, save_last=True),
    ]
    arguments = {"enable_checkpointing": True, "max_epochs": 2, "log_every_n_steps": 1}
    trainer = trainer_on_pool(context, strategy, logger=made, callbacks=callbacks, **arguments)
    trainer.fit(Scheduled("step"), loaders(context), loaders(context, seed=2))
    best = [trainer.checkpoint_callback.best_model_path]  # type: ignore[union-attr]
    trainer.test(Stages(), loaders(context), verbose=False)
    context.barrier()
    return [str(Path(best[0]).name), *sorted(str(p.relative_to(folder)) for p in folder.rglob("*.c*"))]


def log_both(context: RankContext) -> list[tuple[list[str], str]]:
    results = []
    for index, strategy in enumerate(strategies()):
        folder = context.tmp_path / str(index)
        files = log_with(context, strategy, folder)
        results.append((files, (folder / "csv/version_0/metrics.csv").read_text()))
    return results


def test_loggers_and_checkpoints_equal_ddp(ranks: RankPool) -> None:
    got = ranks.run(log_both, world_size=2)
    for ours, ddp in got:
        assert ours[0] == ddp[0]
        mine, theirs = ([line.split(",") for line in text.splitlines()] for text in (ours[1], ddp[1]))
        assert mine[0] == theirs[0]
        assert len(mine) == len(theirs) > 10
        for row, other in zip(mine[1:], theirs[1:], strict=True):
            for cell, expected in zip(row, other, strict=True):
                assert cell == expected or float(cell) == pytest.approx(float(expected), abs=1e-6)
    assert "best/last.ckpt" in got[0][0][0]


class Composed(OddModule):
    """Takes its options as Hydra hands them over."""

    def __init__(self, options: Any, sizes: Any) -> None:
        super().__init__(sgd)
        self.save_hyperparameters()


def keep_hyperparameters(context: RankContext) -> list[Any]:
    config = OmegaConf.create({"options": {"lr": 0.1, "name": "${sizes.0}"}, "sizes": [1, 2]})
    module = Composed(config.options, config.sizes)
    folder = context.tmp_path
    trainer = trainer_on_pool(context, strategy_of(), logger=[CSVLogger(folder), TensorBoardLogger(folder)])
    trainer.fit(module, loaders(context))
    trainer.save_checkpoint(folder / "composed.ckpt")
    loaded = Composed.load_from_checkpoint(folder / "composed.ckpt", weights_only=False)
    return [loaded.hparams["options"]["lr"], loaded.hparams["options"]["name"], list(loaded.hparams["sizes"])]


def test_hyperparameters_may_be_omegaconf_values(ranks: RankPool) -> None:
    assert ranks.run(keep_hyperparameters, world_size=2) == [[0.1, 1, [1, 2]]] * 2


def ask_for_sync_batchnorm(context: RankContext) -> list[str]:
    said = []
    for strategy in strategies():
        trainer = trainer_on_pool(context, strategy, sync_batchnorm=True)
        module = Stages()
        with pytest.raises(ValueError) as raised:
            trainer.fit(module, loaders(context))
        said.append(str(raised.value))
        kinds = {type(part).__name__ for part in module.modules()}
        said.append(str("SyncBatchNorm" in kinds))
        trainer.validate(module, loaders(context), verbose=False)  # nothing to revert
        said.append(str("BatchNorm1d" in {type(part).__name__ for part in module.modules()}))
    return said


def test_sync_batchnorm_is_as_under_ddp(ranks: RankPool) -> None:
    """Torch has it for GPUs only; both say so, and leave the same module behind."""
    for said in ranks.run(ask_for_sync_batchnorm, world_size=2):
        assert said[:3] == said[3:]


def several_trainers(context: RankContext) -> list[int]:
    module = OddModule(sgd)
    steps = []
    for epochs in (1, 2):
        trainer = trainer_on_pool(context, strategy_of(), max_epochs=epochs)
        trainer.fit(module, loaders(context))
        steps.append(trainer.global_step)
    return steps


def test_several_trainers_in_a_script(ranks: RankPool) -> None:
    assert ranks.run(several_trainers, world_size=2) == [[BATCHES, 2 * BATCHES]] * 2


def things_left(*, at_most: int, within_s: float = 5.0) -> int:
    """Threads and descriptors of this process, after those that are just ending: waits until they are ``at_most``."""
    end = time.monotonic() + within_s
    while True:
        left = len(os.listdir("/proc/self/task")) + len(os.listdir("/proc/self/fd"))
        if left <= at_most or time.monotonic() > end:
            return left
        time.sleep(0.02)


def threads_after_fits(context: RankContext) -> list[int]:
    """Without collections of garbage, which come when they please: a fit lets go itself."""
    counts: list[int] = []
    gc.collect()
    gc.disable()
    for fits in range(6):  # the first may start what lasts
        trainer_on_pool(context, strategy_of()).fit(OddModule(sgd), loaders(context))
        counts.append(things_left(at_most=min(counts[1:]) if fits > 1 else sys.maxsize))
    gc.enable()
    return counts


def test_a_fit_leaves_no_thread_and_no_descriptor(ranks: RankPool) -> None:
    for counts in ranks.run(threads_after_fits, world_size=2):
        assert counts[5] - counts[1] <= 1  # one thing left by each fit would make 4


OPTIONS: dict[str, dict[str, Any]] = {
    "fast_dev_run": {"fast_dev_run": 2},
    "anomaly, profiler": {"detect_anomaly": True, "profiler": "simple"},
    "limits": {"limit_train_batches": 0.6, "limit_val_batches": 1, "val_check_interval": 2},
    "reloading": {"reload_dataloaders_every_n_epochs": 1},
    "overfitting": {"overfit_batches": 2},
    "barebones": {"barebones": True},
    "steps": {"max_epochs": -1, "max_steps": 7},
    "deterministic": {"deterministic": True, "gradient_clip_val": 0.5, "inference_mode": False},
}


def train_with_options(context: RankContext) -> dict[str, Pair]:
    both = {"train_dataloaders": loaders(context), "val_dataloaders": loaders(context, seed=2)}
    pairs = {}
    for name, options in OPTIONS.items():
        arguments = {"max_epochs": 2, **options}
        if "barebones" in options:  # it refuses to be told what it does anyway
            arguments |= dict.fromkeys(("logger", "enable_checkpointing", "num_sanity_val_steps"))
            arguments |= dict.fromkeys(("enable_progress_bar", "enable_model_summary"))
        pairs[name] = fit_both(context, partial(Scheduled, "epoch"), lambda: both, **arguments)
    return pairs


def test_options_of_the_trainer_equal_ddp(ranks: RankPool) -> None:
    got = ranks.run(train_with_options, world_size=2)
    for name in OPTIONS:
        check_equal([by_name[name] for by_name in got])


def find_learning_rate(context: RankContext) -> list[float]:
    found: list[float] = []
    for strategy in strategies():
        module = Tunable()
        trainer = trainer_on_pool(context, strategy, default_root_dir=context.tmp_path, max_epochs=4)
        finder = Tuner(trainer).lr_find(module, loaders(context), num_training=12, update_attr=False)
        assert finder is not None
        found += finder.results["loss"]
        trainer.fit(module, loaders(context))
        found.append(float(module.net[0].weight.detach().sum()))  # type: ignore[index, union-attr, operator]
    return found


class Tunable(OddModule):
    lr = 0.1

    def __init__(self) -> None:
        super().__init__(sgd)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def test_learning_rate_finder_equals_ddp(ranks: RankPool) -> None:
    for found in ranks.run(find_learning_rate, world_size=2, fresh=True):  # its progress bar leaves a thread
        half = len(found) // 2
        assert half > 10
        assert found[:half] == pytest.approx(found[half:], abs=1e-6)
