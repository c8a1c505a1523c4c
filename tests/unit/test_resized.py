"""What is counted in batches follows the number of ranks, once, however often a checkpoint is loaded."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_dist.resized import KeptBatch


def checkpoint_of(callback: KeptBatch, *, ranks: int) -> dict[str, Any]:
    batch = {"ranks": ranks, "micro_batch": 1, "accumulation": 1}
    return {"callbacks": {callback.state_key: {"reference": batch, "saved": batch}}}


@pytest.mark.parametrize("times", [1, 2])
def test_what_is_counted_in_batches_is_scaled_from_what_was_asked(times: int) -> None:
    """A first candidate may turn out to be damaged after its callbacks were loaded, and the next one is."""
    callback = KeptBatch()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, val_check_interval=8, limit_train_batches=20, callbacks=[callback],
    )  # fmt: skip
    trainer.state.fn = pl.trainer.states.TrainerFn.FITTING
    for _ in range(times):
        callback.on_load_checkpoint(trainer, pl.LightningModule(), checkpoint_of(callback, ranks=4))
    assert trainer.accumulate_grad_batches == 4
    assert (trainer.val_check_interval, trainer.limit_train_batches) == (32, 80)
    callback.on_load_checkpoint(trainer, pl.LightningModule(), checkpoint_of(callback, ranks=2))
    assert (trainer.val_check_interval, trainer.limit_train_batches) == (16, 40)
