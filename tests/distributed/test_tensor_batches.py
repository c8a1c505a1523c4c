"""Ranks that share layers read the same data, or say that they do not: whatever a batch is, in every kind of step."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812  # the name everybody uses
from torch.utils.data import DataLoader

from lightning_dist.parallel.batches import fingerprint
from tests.distributed.lightning_runs import ListDataset, strategy_of, trainer_on_pool
from tests.distributed.split_models import VOCABULARY, make_gpt
from tests.distributed.test_tensor_training import TENSOR, inside
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext


@dataclasses.dataclass
class Tokens:
    """A batch that is no mapping and no list."""

    values: torch.Tensor


FORMS: dict[str, Any] = {
    "tensor": lambda value: torch.tensor([value, 1]),
    "text": lambda value: ["ab", chr(97 + value)],
    "number": lambda value: value,
    "array": lambda value: np.array([value, 1]),
    "dataclass": lambda value: Tokens(torch.tensor([value, 1])),
    "nested": lambda value: {"a": [{"b": (Tokens(torch.tensor([value])), "x")}], "c": torch.empty(0)},
    "key": lambda value: {f"{value}": 1},
    "bytes": lambda value: bytes([value]),
    "shape": lambda value: torch.zeros(2, value + 1),
    "type": lambda value: torch.zeros(2, dtype=[torch.float32, torch.int32][value]),
}


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_batches_that_differ_have_other_fingerprints(make: Any) -> None:
    assert fingerprint(make(0)) == fingerprint(make(0))
    assert fingerprint(make(0)) != fingerprint(make(1))


def test_what_has_no_content_does_not_count() -> None:
    assert fingerprint([object(), Tokens]) == fingerprint([object(), Tokens])


class Reader(pl.LightningModule):
    """Its ranks read alike, but for the stage, and the epoch, that is named.

    Args:
        where: ``train``, ``val``, ``test`` or ``predict``.
        epoch: In which they differ.
        form: Of the batches.
    """

    def __init__(self, where: str, epoch: int, form: str = "tensor") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = make_gpt()
        self.where, self.epoch, self.form = where, epoch, form

    def _loader(self, where: str) -> DataLoader[Any]:
        differs = where == self.where and self.trainer.current_epoch == self.epoch
        value = self.trainer.global_rank if differs else 0
        return DataLoader(ListDataset([FORMS[self.form](value)] * 2), batch_size=None, collate_fn=lambda batch: batch)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        return self._loader("predict")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens = torch.arange(4)[None] % VOCABULARY
        return F.cross_entropy(self.net(tokens).flatten(0, 1), tokens.flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


READ = [
    ("fit", "train", 0, "text"),
    ("fit", "train", 1, "tensor"),
    ("fit", "val", 1, "tensor"),
    ("validate", "val", 0, "tensor"),
    ("test", "test", 0, "tensor"),
    ("predict", "predict", 0, "dataclass"),
]


def read(context: RankContext, parallel: dict[str, Any]) -> list[str]:
    """What each of :data:`READ` says, and at last a fit whose ranks read alike."""
    said = []
    for call, where, epoch, form in [*READ, ("fit", "nowhere", 0, "text")]:
        trainer = trainer_on_pool(
            context, strategy_of(parallel=parallel), max_epochs=2, reload_dataloaders_every_n_epochs=1
        )
        try:
            getattr(trainer, call)(Reader(where, epoch, form))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("")
    return said


@pytest.mark.parametrize("parallel", [TENSOR, inside("zero3")], ids=["tensor", "zero3"])
def test_ranks_that_read_other_data_end_with_an_error_that_says_so(ranks: RankPool, parallel: dict[str, Any]) -> None:
    for *said, alike in ranks.run(read, world_size=2, args=(parallel,), fresh=True, deadline_s=100):
        for case, text in zip(READ, said, strict=True):
            assert text.startswith("ConfigError: rank 0 and rank 1 share each layer"), f"{case}: {text}"
        assert alike == ""


class Seeded(Reader):
    """Seeds its generators by rank, as scripts for data parallelism do."""

    def __init__(self, by_rank: bool) -> None:
        super().__init__("nowhere", 0)
        self.net = make_gpt(dropout=0.3)
        self.by_rank = by_rank
        self.losses: list[float] = []

    def on_train_start(self) -> None:
        torch.manual_seed(7 + (self.trainer.global_rank if self.by_rank else 0))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        return loss


def seed(context: RankContext, by_rank: bool) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    module = Seeded(by_rank)
    trainer = trainer_on_pool(context, strategy_of(parallel=TENSOR), max_epochs=1, limit_val_batches=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module)
    said = [str(warning.message) for warning in caught if "default generators differed" in str(warning.message)]
    return module.losses, module.net.state_dict(), said


@pytest.mark.parametrize("by_rank", [False, True])
def test_generators_seeded_by_rank_are_made_alike_with_a_warning(ranks: RankPool, by_rank: bool) -> None:
    first, second = ranks.run(seed, world_size=2, args=(by_rank,))
    assert first[0] == second[0]
    assert all(torch.equal(value, second[1][name]) for name, value in first[1].items())
    assert [len(first[2]), len(second[2])] == [int(by_rank), 0]
