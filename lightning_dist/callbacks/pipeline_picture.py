"""A picture of how a pipeline has worked."""

from __future__ import annotations

import json
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_dist.monitor.shown_path import shown_path
from lightning_dist.parallel.pipeline.picture import draw
from lightning_dist.strategy import HierDistStrategy


class PipelinePicture(pl.Callback):
    """Writes how a pipeline has worked when training ends: ``pipeline.html``, a picture, and ``pipeline.json``.

    Args:
        folder: Where to; the Trainer's ``default_root_dir`` if not given.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Every rank takes part; rank 0 writes."""
        strategy = trainer.strategy
        if not isinstance(strategy, HierDistStrategy):
            rank_zero_warn("PipelinePicture has no effect without lightning_dist's strategy and parallel=pipeline")
            return
        report = strategy.pipeline_report()
        if report is None or not trainer.is_global_zero:
            return
        folder = Path(self.folder or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pipeline.html").write_text(draw(report), encoding="utf-8")
        (folder / "pipeline.json").write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
        rank_zero_info(f"hierdist: a picture of the pipeline is in {shown_path(folder / 'pipeline.html')}")
