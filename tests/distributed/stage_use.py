"""What users do with a model in stages, however it is cut: evaluate, save, go on, read its state, fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_dist.errors import LostWeightsError
from tests.distributed.lightning_runs import strategy_of, trainer_on_pool
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

Layout = Mapping[str, list[int]]


def net_of(case: StageCase, weights: dict[str, Tensor] | None = None) -> nn.Module:
    net = StageLearner(case).net
    if weights is not None:
        net.load_state_dict(weights)
    return net


def losses_of(module: StageLearner) -> list[float]:
    return [each["loss"] for each in module.seen]


# -- evaluation -------------------------------------------------------------------------------------------------------


def evaluate(context: RankContext, case: StageCase) -> dict[str, Any]:
    """Validate, predict, fit with validation, test."""
    module = StageLearner(case)
    trainer = trainer_on_pool(context, strategy_for(case))
    said: dict[str, Any] = {"before": trainer.validate(module, verbose=False)[0]["val_loss"]}
    said["predictions"] = trainer.predict(module)
    trainer.fit(module)
    said["in_fit"] = float(trainer.callback_metrics["val_loss"])
    said["after"] = trainer.test(module, verbose=False)[0]["val_loss"]
    said["weights"] = {name: value.clone() for name, value in module.net.state_dict().items()}
    return said


@torch.no_grad()
def check_evaluation(outcomes: Sequence[dict[str, Any]], case: StageCase, *, data_ranks: Sequence[int]) -> None:
    """What :func:`evaluate` gave is what the uncut model gives.

    Args:
        outcomes: Of each rank.
        case: What was evaluated.
        data_ranks: Which part of the data each rank has read.
    """
    net, trained = net_of(case).eval(), net_of(case, outcomes[0]["weights"]).eval()
    batches = {part: make_batches(case.model, 2, seed=50 + part, size=3) for part in sorted(set(data_ranks))}
    every = [batch for part in batches.values() for batch in part]
    before, after = (
        float(torch.stack([loss_of(case, model(input_of(case, batch)), batch) for batch in every]).mean())
        for model in (net, trained)
    )
    for outcome, part in zip(outcomes, data_ranks, strict=True):
        assert outcome["before"] == pytest.approx(before, rel=1e-5)
        assert outcome["in_fit"] == outcome["after"] == pytest.approx(after, rel=1e-5)
        torch.testing.assert_close(outcome["predictions"], [net(input_of(case, batch)) for batch in batches[part]])


# -- checkpoints ------------------------------------------------------------------------------------------------------


def train_and_save(context: RankContext, case: StageCase, parallel: Any, folder: Path) -> list[float]:
    """Two epochs; a checkpoint after the first. Losses of the second."""
    module = StageLearner(case)
    strategy = strategy_for(case) if parallel is None else strategy_of(parallel=parallel)
    saving = ModelCheckpoint(folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
    trainer = trainer_on_pool(
        context, strategy, max_epochs=2, limit_val_batches=0, callbacks=[saving], enable_checkpointing=True
    )
    trainer.fit(module)
    return losses_of(module)[STEPS:]


def go_on(context: RankContext, case: StageCase, parallel: Any, path: Path) -> list[float]:
    """Losses of the second epoch."""
    module = StageLearner(case)
    strategy = strategy_for(case) if parallel is None else strategy_of(parallel=parallel)
    trainer = trainer_on_pool(context, strategy, max_epochs=2, limit_val_batches=0)
    trainer.fit(module, ckpt_path=path)
    return losses_of(module)


def check_checkpoint(
    ranks: RankPool,
    case: StageCase,
    folder: Path,
    *,
    first: str | None,
    second: str | None,
    layouts: Mapping[str | None, Layout],
) -> None:
    """A checkpoint holds the uncut model, tied weights tied, and another mode goes on from it.

    Args:
        ranks: The pool.
        case: Of a model with tied weights.
        folder: For checkpoints.
        first: Mode that saves; ``None``: the case's.
        second: Mode that goes on.
        layouts: Of each mode; all read the same parts of the data.
    """
    expected = ranks.run(train_and_save, layout=layouts[first], args=(case, first, folder))
    saved = torch.load(folder / "epoch=0.ckpt", weights_only=True)
    names = [f"net.{name}" for name, _ in net_of(case).named_parameters(remove_duplicate=False)]
    assert list(saved["state_dict"]) == names
    tied = [saved["state_dict"][f"net.{name}.weight"] for name in ("tokens", "head")]
    assert tied[0].data_ptr() == tied[1].data_ptr()
    found = torch.tensor(ranks.run(go_on, layout=layouts[second], args=(case, second, folder / "epoch=0.ckpt")))
    if second is not None:
        found = found.mean(0, keepdim=True)  # under ddp each rank has the loss of its own part
    for losses in found:  # of stages each rank has the mean
        torch.testing.assert_close(losses, torch.tensor(expected).mean(0), rtol=1e-5, atol=1e-6)


def state_in_fit(context: RankContext, case: StageCase) -> dict[str, Any]:
    """What ``state_dict`` of an inner module gives while the model is cut, what loading does, and what is held."""
    said: dict[str, Any] = {}

    class Look(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            net: Any = pl_module.net
            said["inner"] = {name: value.clone() for name, value in net.state_dict().items()}
            net.load_state_dict({name: value * 2 for name, value in said["inner"].items()})
            parts = [getattr(p, "_local_tensor", p) for p in set(net.parameters())]
            said["memory"] = sum(part.untyped_storage().nbytes() for part in parts)

    module = StageLearner(case)
    trainer_on_pool(context, strategy_for(case), callbacks=[Look()]).fit(module)
    said["after"] = {name: value.clone() for name, value in module.net.state_dict().items()}
    return said


def check_state_in_fit(outcomes: Sequence[dict[str, Any]], case: StageCase, *, most: float) -> None:
    """What :func:`state_in_fit` gave is whole; all ranks together hold at most ``most`` times the model."""
    size = sum(p.numel() * p.element_size() for p in net_of(case).parameters())
    for outcome in outcomes:
        for name, value in outcomes[0]["inner"].items():
            assert torch.equal(outcome["inner"][name], value)
            assert torch.equal(outcome["after"][name], 2 * value)
    assert sum(outcome["memory"] for outcome in outcomes) < most * size, "a rank holds its parts of its stages only"


# -- failure ----------------------------------------------------------------------------------------------------------


class Fails(StageLearner):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            raise ValueError("no more")
        return super().training_step(batch, batch_idx)


def fail_then_use(context: RankContext, case: StageCase) -> None:
    """A fit that fails leaves no wrong weights."""
    module = Fails(case)
    with pytest.raises((ValueError, RuntimeError), match="no more"):
        trainer_on_pool(context, strategy_for(case), limit_val_batches=0).fit(module)
    with pytest.raises(LostWeightsError, match="weights of this"):
        module.net(torch.zeros(2, 7))
