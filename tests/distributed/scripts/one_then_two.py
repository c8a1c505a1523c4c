"""A fit on one rank, which fails or not, and one on two ranks from the same process.

Usage: python one_then_two.py FIRST fails|ends SECOND, with names of strategies.
"""

import sys

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_dist  # noqa: F401  # registers the strategies


class Module(pl.LightningModule):
    def __init__(self, fails):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.fails = fails

    def training_step(self, batch, batch_idx):
        if self.fails and batch_idx == 1:
            raise RuntimeError("the user's own")
        return self.layer(batch[0]).mean()

    def on_train_end(self):
        print(f"rank {self.global_rank} of {self.trainer.world_size} has trained", flush=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(strategy, devices, fails):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_epochs=1, enable_model_summary=False, **quiet
    )
    trainer.fit(Module(fails), DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2))


if __name__ == "__main__":
    first, how, second = sys.argv[1:]
    try:
        fit(first, 1, how == "fails")
    except RuntimeError as error:
        print(f"caught {error}", flush=True)
    fit(second, 2, False)
