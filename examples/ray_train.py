"""Train under Ray Train: Ray starts the ranks, and all of them again when one dies; each start goes on from the newest
checkpoint.

::

    pip install 'lightning-dist[ray]'
    python examples/ray_train.py                                     # 2 ranks on this machine
    python examples/ray_train.py --workers 8 --folder /shared/run-a  # on the cluster that RAY_ADDRESS names
    hierdist report outputs/ray                                      # all starts together, and the goodput
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import AsyncShardedCheckpoint, ClusterMonitor, HierDistStrategy, MonitorOutputs, StepTimeline


class Regression(pl.LightningModule):
    """A small net that learns a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The mean squared error."""
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def name_the_start(folder: Path) -> None:
    """Say which start of which run this is, so that the report joins them; Ray itself does not count."""
    number = [0]
    if dist.get_rank() == 0:
        starts = folder / "starts"
        starts.mkdir(parents=True, exist_ok=True)
        number[0] = len(list(starts.iterdir())) + 1
        (starts / str(number[0])).touch()
    dist.broadcast_object_list(number)  # Ray has let the ranks meet
    os.environ.update(HIERDIST_RUN=str(folder), HIERDIST_ROUND=str(number[0]))


def train(config: dict[str, Any]) -> None:
    """What each rank runs, at each start."""
    folder = Path(config["folder"])
    name_the_start(folder)
    pl.seed_everything(0, verbose=False)
    x = torch.randn(2048, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32, shuffle=True)
    context = ray.train.get_context()
    trainer = pl.Trainer(
        strategy=HierDistStrategy(parallel=config["parallel"]),
        plugins=[RayLightningEnvironment()],
        devices="auto" if torch.cuda.is_available() else context.get_local_world_size(),
        num_nodes=context.get_world_size() // context.get_local_world_size(),
        max_epochs=config["epochs"],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            # At the ends of epochs: a DataLoader's state is not saved, so amid an epoch it would begin that one again.
            AsyncShardedCheckpoint(folder / "checkpoints", every_n_epochs=config["save_every"], save_last=True),
            StepTimeline(),
            ClusterMonitor(),
            MonitorOutputs(loggers=False, history=None),
        ],
    )
    trainer.fit(Regression(), loader, ckpt_path="last")
    if trainer.is_global_zero:
        loss = trainer.callback_metrics["loss"].item()
        print(f"{trainer.world_size} ranks, step {trainer.global_step}: loss {loss:.4f}")


def main() -> None:
    """Hand the training to Ray."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="ranks")
    parser.add_argument("--epochs", type=int, default=20, help="how long to train")
    parser.add_argument("--save-every", type=int, default=1, help="epochs between two checkpoints")
    parser.add_argument("--parallel", default="ddp", help="ddp, zero1, zero2 or zero3")
    parser.add_argument("--folder", type=Path, default=Path("outputs/ray"), help="of the run; all hosts see it")
    parser.add_argument("--max-failures", type=int, default=3, help="how often Ray starts the ranks again")
    given = parser.parse_args()
    folder = given.folder.absolute()
    TorchTrainer(
        train,
        train_loop_config={
            "folder": str(folder),
            "epochs": given.epochs,
            "save_every": given.save_every,
            "parallel": given.parallel,
        },
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            name="ray", storage_path=str(folder), failure_config=FailureConfig(max_failures=given.max_failures)
        ),
    ).fit()


if __name__ == "__main__":
    main()
