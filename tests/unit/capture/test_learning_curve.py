"""What a Trainer's steps leave for ``hierdist ab``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hierdist_ab_hook
from lightning_dist.callbacks.learning_curve import LearningCurve
from lightning_dist.experiment.curves import Curve, read_curve


class Falling(pl.LightningModule):
    """Its loss is the mean of its batch, times a weight that falls by 1 in each optimizer step."""

    def __init__(self, *, by_hand: bool = False, fails_at: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(100.0))
        self.automatic_optimization = not by_hand
        self._fails_at = fails_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self._fails_at:
            raise ValueError("on purpose")
        loss = (batch[0] * self.weight).mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss / batch[0].mean())
        optimizer.step()
        return {"loss": loss.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.weight)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        if self.automatic_optimization:
            self.weight.grad.fill_(1.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def loader(count: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(1.0, count + 1)), batch_size=1)


def fit(folder: Path, model: Falling | None = None, data: Any = None, **arguments: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {"max_epochs": 1, "num_sanity_val_steps": 1}
    if not (model and not model.automatic_optimization):
        defaults["gradient_clip_val"] = 1.0  # so that the hook that sets the gradient is called
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[LearningCurve(folder)],
        **{**defaults, **arguments},
    )
    trainer.fit(model or Falling(), data or loader(), loader(1))
    return trainer


def shuffled(folder: Path, *, seed: int) -> Curve:
    torch.manual_seed(seed)
    fit(folder, data=DataLoader(TensorDataset(torch.arange(1.0, 9.0)), batch_size=1, shuffle=True))
    return read_curve(folder)


@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
class TestCurve:
    def test_each_optimizer_step_has_the_loss_of_its_micro_batches(self, tmp_path: Path) -> None:
        fit(tmp_path, accumulate_grad_batches=2)
        curve = read_curve(tmp_path)
        assert curve.losses.steps == (1, 2, 3, 4)
        assert curve.losses.values == (150.0, 3.5 * 99, 5.5 * 98, 7.5 * 97)
        assert list(curve.losses.seconds) == sorted(curve.losses.seconds)
        assert curve.is_whole
        assert curve.crossed_bytes is None
        assert curve.sent_bytes is None

    def test_a_loss_optimized_by_hand_is_not_scaled(self, tmp_path: Path) -> None:
        fit(tmp_path, Falling(by_hand=True), max_steps=3)
        assert read_curve(tmp_path).losses.values == (100.0, 2 * 99.0, 3 * 98.0)

    def test_validation_of_training_is_kept_and_its_time_is_not(self, tmp_path: Path) -> None:
        fit(tmp_path, val_check_interval=4)
        track = read_curve(tmp_path).track("val_loss")
        assert track is not None
        assert (track.steps, track.values) == ((4, 8), (96.0, 92.0))

    def test_batches_are_told_apart(self, tmp_path: Path) -> None:
        first, second = (shuffled(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 1)))
        assert first.batches.keys() == second.batches.keys() == {1, 2, 4, 8}
        assert first.batches == shuffled(tmp_path / "c", seed=0).batches
        assert first.batches != second.batches

    def test_a_fit_that_fails_is_not_whole(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="on purpose"):
            fit(tmp_path, Falling(fails_at=3))
        curve = read_curve(tmp_path)
        assert curve.num_steps == 3
        assert not curve.is_whole

    def test_a_further_fit_is_not_written_down(self, tmp_path: Path) -> None:
        trainer = fit(tmp_path)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(Falling(), loader(), loader(1))
        assert read_curve(tmp_path).num_steps == 8

    def test_a_folder_that_cannot_be_made_ends_no_training(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.warns(UserWarning, match="learns nothing of this rank"):
            assert fit(tmp_path / "file").global_step == 8


def test_the_hook_adds_it_where_an_experiment_asks_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(hierdist_ab_hook.VARIABLE, raising=False)
    assert hierdist_ab_hook.callbacks() == []
    monkeypatch.setenv(hierdist_ab_hook.VARIABLE, str(tmp_path))
    assert [type(each) for each in hierdist_ab_hook.callbacks()] == [LearningCurve]


def test_the_hook_costs_others_no_import() -> None:
    code = "import sys, hierdist_ab_hook; hierdist_ab_hook.callbacks(); assert 'torch' not in sys.modules"
    environment = {name: value for name, value in os.environ.items() if name != hierdist_ab_hook.VARIABLE}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment)
