"""A Lightning script whose only change is ``strategy="hierdist"``. Run it: ``python examples/plain_script.py``."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dist  # noqa: F401  # registers the strategy


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    pl.seed_everything(0)
    x = torch.randn(1024, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32, shuffle=True)
    trainer = pl.Trainer(strategy="hierdist", accelerator="cpu", devices=2, max_epochs=2, logger=False)
    trainer.fit(Regression(), loader)
    print(f"rank {trainer.global_rank} of {trainer.world_size}: loss {trainer.callback_metrics['loss']:.4f}")
