"""A Lightning script that knows nothing of this package: ``plain_training.py [strategy [devices [hosts]]]``, on CPU."""

import sys
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    strategy, devices, hosts = [*sys.argv[1:], *("ddp", 2, 1)[len(sys.argv) - 1 :]]
    x = torch.randn(4096, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(devices),
        num_nodes=int(hosts),
        max_epochs=50,
        callbacks=[ModelCheckpoint("kept", save_last=True, every_n_train_steps=10)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), loader)
    trainer.save_checkpoint("final.ckpt")
    print("the script went on")
