"""Fits over streamed data on the ranks of a pool, that log which samples were trained on, and resume from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_dist import DataConfig, ResumeData, ShardedDataModule, ShardedLoader
from tests.distributed.lightning_runs import strategy_of, trainer_on_pool
from tests.support.numbered import Ids, ids_of
from tests.support.tasks import RankContext

OPTIONS = {"batch_size": 2, "lanes": 6, "shuffle_block": 4}


class Logging(pl.LightningModule):
    """Notes which samples it is given, and in which epoch."""

    def __init__(self, make_loaders: Callable[[], Any] | None = None, *, asks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)
        self.trained: list[tuple[int, Any]] = []
        self.validated: list[list[int]] = []
        self.saved: dict[int, int] = {}  # step -> batches that were trained on by then
        self._make_loaders = make_loaders
        self._asks = asks

    def train_dataloader(self) -> Any:
        """Called only where no data module is given."""
        assert self._make_loaders is not None
        return self._make_loaders()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        parts = parts if isinstance(parts, list) else [parts]
        self.trained.append((self.trainer.current_epoch, [ids_of(part) for part in parts if part is not None]))
        return self.layer(parts[0].float().reshape(-1, 1)).mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append(ids_of(batch))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saved[self.trainer.global_step] = len(self.trained)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        if not self._asks:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Unsized(IterableDataset[torch.Tensor]):
    """One batch, over and over, without a length, which makes Lightning take one ahead."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.tensor([0])])


@dataclass
class Case:
    """One way to train.

    Attributes:
        strategy: ``hierdist``, ``async`` (the same, with checkpoints as folders), ``zero3``, or ``ddp``.
        loaders: ``module`` (a data module), ``bare``, ``list``, ``dict``, ``min_size``, or ``beside`` one that has no
            length.
        data: Options.
        trainer: Arguments of the Trainer.
        save: Arguments of ``ModelCheckpoint``.
        asks: Whether the optimizer wants to know the number of steps.
        has_val: Whether there is validation.
    """

    strategy: str = "hierdist"
    loaders: str = "module"
    data: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    save: dict[str, Any] = field(default_factory=lambda: {"every_n_train_steps": 1})
    asks: bool = False
    has_val: bool = False


def strategies_of(name: str) -> Any:
    """A new one each time: a strategy is of one Trainer."""
    return {
        "hierdist": lambda: strategy_of(),
        "async": lambda: strategy_of(checkpoint="async_sharded"),
        "zero3": lambda: strategy_of(parallel="zero3", checkpoint="sharded"),
        "ddp": lambda: "ddp",
    }[name]()


def loader_of(size: int, **options: Any) -> ShardedLoader:
    return ShardedLoader(Ids(size), config=DataConfig(**{**OPTIONS, **options}))


def fit(
    context: RankContext,
    case: Case,
    *,
    size: int = 29,
    folder: Path | None = None,
    ckpt_path: Path | None = None,
    callbacks: tuple[pl.Callback, ...] = (),
    **trainer: Any,
) -> Logging:
    """One fit; it saves if there is a folder."""

    def make_loaders() -> Any:
        one = loader_of(size, **case.data)
        if case.loaders == "bare":
            return one
        if case.loaders == "beside":
            return [one, DataLoader(Unsized(), batch_size=None)]
        pair = {"x": one, "y": loader_of(size // 2, **case.data)}
        if case.loaders == "min_size":
            return CombinedLoader(pair, "min_size")
        return pair if case.loaders == "dict" else list(pair.values())

    data = None
    module = Logging(make_loaders, asks=case.asks)
    if case.loaders == "module":
        data = ShardedDataModule(Ids(size), val=Ids(5) if case.has_val else None, config={**OPTIONS, **case.data})
    elif case.strategy == "ddp":
        callbacks = (*callbacks, ResumeData())
    if folder is not None:
        callbacks = (*callbacks, ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **case.save))
    arguments = {"max_epochs": 3, "callbacks": list(callbacks), "enable_checkpointing": folder is not None}
    arguments["use_distributed_sampler"] = True  # Lightning's default, which must not reach our loaders
    made = trainer_on_pool(context, strategies_of(case.strategy), **{**arguments, **case.trainer, **trainer})
    made.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module


def resume_problems(context: RankContext, name: str, case: Case, steps: list[int] | None) -> list[str]:
    """What is not as in the uninterrupted run, resumed from the checkpoints of some steps, or from all."""
    folder = context.tmp_path / name
    whole = fit(context, case, folder=folder)
    context.barrier()
    saved = {int(path.name.split("=")[1].split(".")[0]): path for path in sorted(folder.iterdir())}
    problems = [] if whole.trained else ["nothing was trained on"]
    for step in saved if steps is None else steps:
        again = fit(context, case, ckpt_path=saved[step])
        rest = whole.trained[whole.saved[step] :]
        if again.trained != rest:
            problems.append(f"from step {step}: {len(again.trained)}, {again.trained[:4]}; not {len(rest)}, {rest[:4]}")
        if again.validated != whole.validated[len(whole.validated) - len(again.validated) :]:
            problems.append(f"from step {step}, validated: {again.validated}")
        if again.trainer.global_step != whole.trainer.global_step:
            problems.append(f"from step {step} to step {again.trainer.global_step}, not {whole.trainer.global_step}")
    return problems


class StopAfter(pl.Callback):
    """Ends a fit in the middle of an epoch, as if it had been killed; the checkpoint of that step is there."""

    def __init__(self, batches: int) -> None:
        self._left = batches

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._left -= 1
        trainer.should_stop = self._left <= 0


def part_of_run(
    context: RankContext, case: Case, folder: Path, step: int | None, batches: int | None
) -> tuple[list[tuple[int, Any]], int, int]:
    """Train on from a step for some batches, or to the end: what was trained on, the last step, and steps an epoch."""
    path = None if step is None else next(path for path in folder.iterdir() if path.stem == f"step={step}")
    callbacks = () if batches is None else (StopAfter(batches),)
    module = fit(context, case, folder=folder, ckpt_path=path, callbacks=callbacks)
    return module.trained, module.trainer.global_step, int(module.trainer.num_training_batches)
