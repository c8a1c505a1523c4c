"""Streamed data as a LightningDataModule."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl

from lightning_dist.config import DataConfig, resolve_options
from lightning_dist.data.loading.loader import ShardedLoader, sources_of
from lightning_dist.data.loading.open_loaders import OpenLoaders
from lightning_dist.data.loading.source import Source
from lightning_dist.data.order.replicas import of_nodes
from lightning_dist.errors import ConfigError
from lightning_dist.resuming import attach, follow


class ShardedDataModule(pl.LightningDataModule):
    """Loaders of streamed data, for training, validation, test and prediction; under any strategy.

    Args:
        train: A folder, as a path or URL, a map-style data set, a
            :class:`~lightning_dist.data.loading.source.Source`, or several sources, which are mixed by their weights.
        val: The same, for validation; a mapping of names gives a loader for each.
        test: The same, for tests.
        predict: The same, for prediction.
        config: Options, or a mapping of them.
        transform: Of a training sample, or of a sample and a numpy generator that is made for it.
        eval_transform: Of the others' samples; the same as in training, if not given.
        collate: Makes a batch of a list of samples; torch's ``default_collate`` by default.
        epoch_samples: Samples of an epoch of a mixture.
        eval_batch_size: Samples a rank and batch in evaluation; as in training, if not given.
    """

    def __init__(
        self,
        train: Any = None,
        *,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        config: DataConfig | Mapping[str, Any] | None = None,
        transform: Callable[..., Any] | None = None,
        eval_transform: Callable[..., Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        epoch_samples: int | None = None,
        eval_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self.config = resolve_options("data", config, DataConfig)
        self._data = {"train": train, "val": val, "test": test, "predict": predict}
        for name, data in self._data.items():  # what cannot be data is to be known at once
            for each in data.values() if isinstance(data, Mapping) and name != "train" else [data]:
                if each is not None:
                    sources_of(each)
        self._transform = transform
        self._eval_transform = eval_transform if eval_transform is not None else transform
        self._collate = collate
        self._epoch_samples = epoch_samples
        self._eval_batch_size = eval_batch_size
        self._config_of(trains=False)  # a wrong size is to be known at once
        self._loaders = OpenLoaders()
        if val is None and type(self).val_dataloader is ShardedDataModule.val_dataloader:
            self.val_dataloader = None  # type: ignore[method-assign, assignment]  # to Lightning, as if there were no such hook

    @property
    def batch_size(self) -> int:
        """Samples a rank and batch; in evaluation too, unless ``eval_batch_size`` was given.

        Lightning's ``BatchSizeFinder`` and ``Tuner.scale_batch_size`` set it. Loaders that are made afterwards have it;
        a rank that has fewer training samples takes them all, with a warning.
        """
        return self.config.batch_size

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        most = min((loader.largest_batch for loader in self._loaders if loader.role == "train"), default=size)
        if size > most:
            warnings.warn(
                f"batch_size={size}: a rank has {most} samples an epoch, so its batch has {most}", stacklevel=2
            )
        self.config = replace(self.config, batch_size=min(size, most))

    def train_dataloader(self) -> Any:
        """Of training samples."""
        return self._loader("train", "train")

    def val_dataloader(self) -> Any:
        """Of validation samples."""
        return self._loader("val", "evaluate")

    def test_dataloader(self) -> Any:
        """Of test samples."""
        return self._loader("test", "evaluate")

    def predict_dataloader(self) -> Any:
        """Of samples to predict, in the order of their files."""
        return self._loader("predict", "predict")

    def __str__(self) -> str:
        """Of what, for which stage; Lightning's own opens every loader."""
        given = ", ".join(f"{name}={_text(data)}" for name, data in self._data.items() if data is not None)
        return f"{type(self).__name__}({given})"

    def teardown(self, stage: str) -> None:
        """End workers, and what is open."""
        self._loaders.close()

    def on_exception(self, exception: BaseException) -> None:
        """End workers, and what is open."""
        self._loaders.close()

    def _loader(self, name: str, role: str) -> Any:
        data = self._data[name]
        if data is None:
            raise ConfigError(f"ShardedDataModule has no data for this: write ShardedDataModule({name}=...)")
        if isinstance(data, Mapping) and role != "train":
            return {key: self._made(each, role) for key, each in data.items()}
        return self._made(data, role)

    def _config_of(self, *, trains: bool) -> DataConfig:
        if trains or self._eval_batch_size is None:
            return self.config
        return replace(self.config, batch_size=self._eval_batch_size)

    def _made(self, data: Any, role: str) -> ShardedLoader:
        trains = role == "train"
        loader = ShardedLoader(
            data,
            config=self._config_of(trains=trains),
            role=role,
            transform=self._transform if trains else self._eval_transform,
            collate=self._collate,
            epoch_samples=self._epoch_samples if trains else None,
        )
        trainer = self.trainer
        if trainer is not None:
            part = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
            loader.place(of_nodes(part["num_replicas"], part["rank"], trainer.num_nodes))
            loader.set_epoch(trainer.current_epoch)
            attach(trainer)
            if trains:
                follow(trainer, loader)
            overfits = getattr(trainer, "overfit_batches", 0)  # made outside its class
            if trains and not overfits:  # else Lightning would want its sampler
                loader.dataset = range(loader.largest_batch)
        self._loaders.add(loader)
        return loader


def _text(data: Any) -> str:
    """Names of folders; of a data set, its type."""
    if isinstance(data, Mapping):
        return "{" + ", ".join(f"{key}: {_text(each)}" for key, each in data.items()) + "}"
    if isinstance(data, list | tuple) and any(isinstance(each, Source) for each in data):
        return "[" + ", ".join(map(_text, data)) + "]"
    if isinstance(data, Source):
        return data.name
    return os.fspath(data) if isinstance(data, str | os.PathLike) else type(data).__name__
