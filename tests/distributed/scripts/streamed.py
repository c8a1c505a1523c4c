"""Trains on streamed ids by two ranks. Usage: python streamed.py STRATEGY; each rank prints what it has trained on."""

import sys

import lightning.pytorch as pl
import torch
from torch.utils.data import Dataset

from lightning_dist import ShardedDataModule


class Ids(Dataset):
    def __len__(self):
        return 13

    def __getitem__(self, index):
        return index


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.trained = []

    def training_step(self, batch, batch_idx):
        self.trained += batch.tolist()
        return self.layer(batch.float()[:, None]).mean()

    def on_train_end(self):
        print(f"rank {self.global_rank} trained on {self.trained}", flush=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    workers = {"workers": 2, "readers": "processes", "persistent": True}
    data = ShardedDataModule(Ids(), config={"batch_size": 2, "last_batch": "short", **workers})
    trainer = pl.Trainer(
        strategy=sys.argv[1],
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), datamodule=data)
