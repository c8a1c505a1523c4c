"""A model in two stages, under ``hierdist launch``; the strategy refuses numbers of ranks that do not fit."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_dist import HierDistStrategy


class Split(LightningModule):
    pipeline_layers = "layers"

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    trainer = Trainer(
        accelerator="cpu",
        strategy=HierDistStrategy(parallel={"mode": "pipeline", "pipeline": {"size": 2}}, elastic="restart"),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Split(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4))
