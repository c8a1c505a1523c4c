"""What a Trainer may have that does not go with a model of which each rank has a part."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from lightning_dist.comm.feedback import Feedback
from lightning_dist.errors import CollectiveError, CombinationError
from lightning_dist.gradsync.powersgd import LowRankFeedback


def refuse_wholes(
    trainer: pl.Trainer,
    module: nn.Module,
    precision: Precision,
    *,
    averages: str,
    scaler: str,
    batch_norm: str,
) -> None:
    """Refuse what works on whole models only.

    Args:
        trainer: Its callbacks are looked at.
        module: The user's.
        precision: The Trainer's plugin.
        averages: Why parameters cannot be averaged, and what to write instead.
        scaler: Why a loss cannot be scaled, and what to write instead.
        batch_norm: Why statistics cannot be taken over ranks, and what to write instead.

    Raises:
        CombinationError: The run has some of it.
    """
    averaging = [c for c in trainer.callbacks if isinstance(c, WeightAveraging | StochasticWeightAveraging)]  # type: ignore[attr-defined]
    if averaging:
        raise CombinationError(f"{type(averaging[0]).__name__} averages {averages}")
    if getattr(precision, "scaler", None) is not None:
        raise CombinationError(f"precision=16-mixed: {scaler}")
    if any(isinstance(inner, nn.SyncBatchNorm) for inner in module.modules()):
        raise CombinationError(f"sync_batchnorm=True{batch_norm}")


def refuse_scaled_products(trainer: pl.Trainer, feedback: Feedback | None) -> None:
    """Refuse a loss that is scaled where what products leave out of gradients is kept.

    Args:
        trainer: Its precision is looked at.
        feedback: What is kept; ``None``: nothing is.

    Raises:
        CombinationError: Both are there.
    """
    if isinstance(feedback, LowRankFeedback) and trainer.precision == "16-mixed":
        raise CombinationError(
            "sync=powersgd with precision=16-mixed: what is owed of gradients is in units of a loss scale that "
            "changes; write precision=bf16-mixed, or sync=bf16"
        )


def refuse_after_failure(failure: str | None, what: str) -> None:
    """Refuse to gather for a checkpoint what is spread over ranks, some of which may be gone.

    Args:
        failure: What has failed; ``None``: nothing.
        what: What would be gathered.

    Raises:
        CollectiveError: Something has failed.
    """
    if failure is not None:
        raise CollectiveError(
            f"{what} cannot be gathered for a checkpoint after a failure (a callback that saves on an exception, such "
            f"as OnExceptionCheckpoint, needs parallel=ddp). The failure was: {failure}"
        )
