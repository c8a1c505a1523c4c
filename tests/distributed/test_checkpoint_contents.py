"""How much sharded checkpoints take: on disk what the state has, and in memory no more after many than after some."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_dist.checkpoint.catalog import open_checkpoint
from lightning_dist.checkpoint.storage import open_folder
from tests.distributed.lightning_runs import (
    OddModule,
    adamw,
    loader_of,
    make_batches,
    strategy_of,
    trainer_on_pool,
)
from tests.distributed.test_checkpoint_layouts import SaveAtEnd
from tests.distributed.test_optimization import make_scaled, make_scaler
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

SIZE = 200
ALLOWED = 1.05
"""Bytes on disk over those of the state."""


class ManyKinds(nn.Module):
    """Weights that are tied, that are views of something larger, that do not train, and that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, SIZE)
        self.frozen = nn.Linear(SIZE, SIZE).requires_grad_(False)
        self.unused = nn.Linear(SIZE, SIZE)
        self.middle = nn.Linear(SIZE, SIZE, bias=False)
        self.tied = nn.Linear(SIZE, SIZE, bias=False)
        self.tied.weight = self.middle.weight
        self.view = nn.Parameter(torch.randn(20 * SIZE, SIZE)[:SIZE])  # of twenty times as much
        self.last = nn.Linear(SIZE, 3)
        self.register_buffer("seen", torch.zeros(50 * SIZE)[::50])

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(self.first(x)))
        hidden = torch.tanh(self.tied(torch.tanh(self.middle(hidden))) @ self.view)
        return self.last(hidden + self.seen)


def bytes_of_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Each tensor of a model and its optimizer once, whole."""
    tensors = [*module.parameters(), *module.buffers()]
    tensors += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class MeasureAtEnd(pl.Callback):
    """The size of the state, while the model is as it was trained."""

    size_bytes = 0

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.size_bytes = bytes_of_state(pl_module, trainer.optimizers[0])


def batches_of(rank: int) -> list[Any]:
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(4, 7, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(2)]


def save_kinds(context: RankContext, folder: str, parallel: str) -> tuple[int, list[str]]:
    module, measure = OddModule(adamw, ManyKinds), MeasureAtEnd()
    strategy = strategy_of(parallel=parallel, checkpoint="async_sharded", find_unused_parameters=True)
    callbacks = [measure, SaveAtEnd(Path(folder) / "kinds.ckpt")]
    trainer = trainer_on_pool(context, strategy, callbacks=callbacks, limit_val_batches=0)
    trainer.fit(module, loader_of(batches_of(context.rank)))
    return measure.size_bytes, list(module.state_dict())


@pytest.mark.parametrize("parallel", ["ddp", "zero2"])
def test_the_disk_holds_what_the_state_has(ranks: RankPool, tmp_path: Path, parallel: str) -> None:
    (size_bytes, names), _ = ranks.run(save_kinds, world_size=2, args=(str(tmp_path), parallel))
    folder = tmp_path / "kinds.ckpt"
    on_disk = sum(path.stat().st_size for path in folder.iterdir())
    assert size_bytes > 1_000_000
    manifest = open_checkpoint(open_folder(folder), full=True).manifest
    assert {f"model/{name}" for name in names} == {
        name for name in (*manifest.tensors, *manifest.aliases) if name.startswith("model/")
    }
    assert on_disk <= ALLOWED * size_bytes
    assert on_disk >= size_bytes


class Scale(pl.Callback):
    """The scale of losses when training begins, and when it ends."""

    def __init__(self) -> None:
        self.scales: list[float] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())

    on_train_end = on_train_start


def save_scaled(context: RankContext, folder: str) -> list[float]:
    """An epoch in fp16 in which a batch overflows, so that the scale is halved; and another one."""
    scales: list[float] = []
    path = Path(folder) / "scaled.ckpt"
    for epochs in (1, 2):
        seen = Scale()
        strategy = strategy_of(parallel="zero2", checkpoint={"mode": "async_sharded", "snapshot": "overlapped"})
        trainer = trainer_on_pool(
            context, strategy, callbacks=[seen, SaveAtEnd(path)], plugins=make_scaler(), max_epochs=epochs
        )
        batches = make_batches(context.world_size, 4)[context.rank]
        trainer.fit(make_scaled(), loader_of(batches), ckpt_path=str(path) if epochs == 2 else None)
        scales += seen.scales
    return scales


def test_the_scale_of_fp16_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    for first, halved, resumed, _ in ranks.run(save_scaled, world_size=2, args=(str(tmp_path),)):
        assert (halved, resumed) == (first / 2, first / 2)


# -- memory ------------------------------------------------------------------------------------------------------------


class SaveOften(pl.Callback):
    """Saves after each batch over the one before, and looks at the memory."""

    def __init__(self, path: Path, looks: tuple[int, ...]) -> None:
        self.path = path
        self.looks = looks
        self.resident_bytes: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        trainer.save_checkpoint(self.path)
        if trainer.global_step in self.looks:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.resident_bytes.append(pages * os.sysconf("SC_PAGESIZE"))


def save_often(context: RankContext, folder: str, looks: tuple[int, int]) -> list[int]:
    save = SaveOften(Path(folder) / "often.ckpt", looks)
    strategy = strategy_of(parallel="zero2", checkpoint="async_sharded", find_unused_parameters=True)
    trainer = trainer_on_pool(context, strategy, callbacks=[save], limit_val_batches=0, max_epochs=looks[1] // 2)
    trainer.fit(OddModule(adamw, ManyKinds), loader_of(batches_of(context.rank)))
    return save.resident_bytes


@pytest.mark.parametrize(
    ("looks", "allowed_mib"), [((10, 40), 8), pytest.param((50, 200), 16, marks=pytest.mark.sweep)]
)
def test_memory_is_flat_over_many_saves(
    ranks: RankPool, tmp_path: Path, looks: tuple[int, int], allowed_mib: int
) -> None:
    """A state that were kept by each save would be as many times its part of a megabyte."""
    results = ranks.run(save_often, world_size=2, args=(str(tmp_path), looks), fresh=True, deadline_s=110)
    for rank, (early, late) in enumerate(results):
        print(f"rank {rank}: {late - early:+,} bytes of resident memory from save {looks[0]} to save {looks[1]}")
        assert late - early < allowed_mib << 20
