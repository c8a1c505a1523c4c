"""How a Trainer's fit ends on a rank of a pool, where something fails."""

from __future__ import annotations

import contextlib
import traceback
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_dist.errors import CollectiveError


def ending_of_fit(trainer: pl.Trainer, *fit_arguments: Any) -> dict[str, Any]:
    """Fit, and say how it ended: whether by an error of ours, its text, and that with what it came from."""
    try:
        trainer.fit(*fit_arguments)
    except Exception as error:
        return {
            "is_ours": isinstance(error, CollectiveError),
            "text": f"{type(error).__name__}: {error}",
            "trace": "".join(traceback.format_exception(error)),
        }
    finally:
        with contextlib.suppress(RuntimeError):
            if dist.is_initialized():
                dist.destroy_process_group()
    return {"is_ours": False, "text": "", "trace": ""}
