"""Lightning's search for a batch size and for a learning rate, over streamed data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.tuner import Tuner

from lightning_dist import ShardedDataModule
from lightning_dist.errors import ConfigError
from tests.support.numbered import Ids, ids_of


class Fitted(pl.LightningModule):
    """Notes the samples of each step, and has no memory for more than so many."""

    def __init__(self, most: int = 10**9) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)
        self.lr = 0.1
        self.most = most
        self.trained: list[list[int]] = []
        self.validated: list[int] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if len(batch) > self.most:
            raise RuntimeError("CUDA out of memory.")
        self.trained.append(ids_of(batch))
        return (self.layer(batch.float()[:, None] / 100) - 0.5).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.validated.append(len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def trainer_in(folder: Path, **options: Any) -> pl.Trainer:
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    arguments = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False, **quiet, **options}
    return pl.Trainer(default_root_dir=folder, **arguments)


def data_of(size: int = 100, **options: Any) -> ShardedDataModule:
    parts = {name: options.pop(name) for name in list(options) if name == "eval_batch_size"}
    return ShardedDataModule(Ids(size), val=Ids(9), config={"batch_size": 2, **options}, **parts)


@pytest.mark.filterwarnings("ignore:batch_size=128")
@pytest.mark.parametrize(
    ("most", "mode", "last_batch", "expected"),
    [(20, "power", "drop", 16), (20, "binsearch", "short", 20), (10**9, "power", "drop", 100)],
)
def test_the_largest_batch_size_is_found_and_trained_with(
    tmp_path: Path, most: int, mode: str, last_batch: str, expected: int
) -> None:
    """As with any loader: at most what the memory takes, or all samples."""
    module, data, trainer = Fitted(most), data_of(last_batch=last_batch), trainer_in(tmp_path)
    found = Tuner(trainer).scale_batch_size(module, datamodule=data, mode=mode, margin=0.0)
    assert found == data.batch_size == expected
    module.trained.clear()
    trainer.fit(module, datamodule=data)
    assert len(module.trained[0]) == expected
    samples = [sample for batch in module.trained for sample in batch]
    assert len(samples) == len(set(samples)) == 100 - (100 % expected if last_batch == "drop" else 0)


def test_on_several_ranks_lightning_refuses_to_search_for_a_batch_size(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch size is currently not supported with distributed strategies"):
        Tuner(trainer_in(tmp_path, strategy="hierdist")).scale_batch_size(Fitted(), datamodule=data_of())


def test_a_size_that_is_set_holds_for_the_next_loaders() -> None:
    data = data_of(eval_batch_size=3)
    assert data.batch_size == 2
    assert data.train_dataloader().batch_size == 2
    data.batch_size = 5
    assert (data.batch_size, data.config.batch_size) == (5, 5)
    assert data.train_dataloader().batch_size == 5
    assert data.val_dataloader().batch_size == 3
    with pytest.raises(ConfigError, match=r"data\.batch_size=0 samples"):
        data.batch_size = 0
    with pytest.raises(ConfigError, match=r"data\.batch_size=0 samples"):
        data_of(eval_batch_size=0)
    loader = data.train_dataloader()
    with pytest.warns(UserWarning, match="batch_size=1000: a rank has 100 samples an epoch"):
        data.batch_size = 1000
    assert data.batch_size == 100
    assert loader.batch_size == 5


def test_training_is_the_same_after_a_search_for_a_learning_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # the search's bar would start a thread that stays
    expected = Fitted()
    trainer_in(tmp_path).fit(expected, datamodule=data_of())
    module, data, trainer = Fitted(), data_of(), trainer_in(tmp_path)
    search = Tuner(trainer).lr_find(module, datamodule=data, num_training=20, update_attr=False)
    assert search is not None
    assert search.suggestion() is not None
    assert len(module.trained) == 20
    module.trained.clear()
    trainer.fit(module, datamodule=data)
    assert module.trained == expected.trained
    assert torch.equal(module.layer.weight, expected.layer.weight)


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_overfitting_beside_another_loader_needs_no_sampler(tmp_path: Path) -> None:
    """Lightning replaces the samplers of loaders that have a data set."""

    class Beside(ShardedDataModule):
        def train_dataloader(self) -> Any:
            other = torch.utils.data.DataLoader(Ids(8), batch_size=2, shuffle=True)
            return [super().train_dataloader(), other]

    class Both(Fitted):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch[0], batch_idx)

    module = Both()
    trainer_in(tmp_path, overfit_batches=3).fit(
        module, datamodule=Beside(Ids(100), val=Ids(9), config={"batch_size": 2})
    )
    assert len(module.trained) == 3
