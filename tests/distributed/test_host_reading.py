"""A run that loads a sharded checkpoint reads it once per host, and ends alike on all ranks where that fails."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_dist.checkpoint.local_disk import LocalFolder
from lightning_dist.checkpoint.save_ids import is_manifest
from lightning_dist.errors import CheckpointError
from tests.distributed.lightning_runs import OddModule, adamw, loader_of, make_batches, strategy_of, trainer_on_pool
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

TWO_HOSTS = {"a": [0, 1], "b": [2, 3]}
FOUR_HOSTS = {"a": [0], "b": [1], "c": [2], "d": [3]}
LIMIT = 1.02
"""Of the bytes of a checkpoint, what a host may read: the rest is what lies between what it needs."""


def wide_model() -> nn.Sequential:
    """A rank's part of its optimizer's state is larger than what is read rather than asking twice."""
    return nn.Sequential(nn.Linear(7, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3))


@contextlib.contextmanager
def reading(before: Callable[[LocalFolder, str, int], None]) -> Iterator[None]:
    """Inside, something happens before bytes of a file are read: it is told the folder, the file and how many."""
    read_into, read = LocalFolder.read_into, LocalFolder.read

    def read_part(self: LocalFolder, name: str, start: int, target: memoryview) -> None:
        before(self, name, len(target))
        read_into(self, name, start, target)

    def read_all(self: LocalFolder, name: str) -> bytes | None:
        data = read(self, name)
        before(self, name, len(data or b""))
        return data

    with patch.object(LocalFolder, "read_into", read_part), patch.object(LocalFolder, "read", read_all):
        yield


class KeepLoaded(pl.Callback):
    """Keeps what this rank has when training begins: its parts of parameters and of the optimizer's state."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        optimizer = trainer.optimizers[0]
        held = [*pl_module.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
        self.tensors = [_local(value).detach().clone() for value in held if isinstance(value, torch.Tensor)]


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _trainer(context: RankContext, parallel: Any, epochs: int, *callbacks: pl.Callback, **sync: Any) -> pl.Trainer:
    strategy = strategy_of(parallel=parallel, checkpoint="sharded", sync=sync)
    sizes = {"limit_val_batches": 0, "max_epochs": epochs}
    return trainer_on_pool(context, strategy, callbacks=list(callbacks), **sizes)


def _fit(context: RankContext, trainer: pl.Trainer, path: str | None = None) -> None:
    batches = make_batches(context.world_size, 2)[context.rank]
    trainer.fit(OddModule(adamw, wide_model), loader_of(batches), ckpt_path=path)


class SaveAtEnd(pl.Callback):
    """Saves once."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def save(context: RankContext, path: str, parallel: Any) -> None:
    _fit(context, _trainer(context, parallel, 1, SaveAtEnd(path)))


def resume(
    context: RankContext, path: str, parallel: Any, shared_memory: str = "auto"
) -> tuple[Counter[str], list[torch.Tensor]]:
    """Bytes that this rank read, by file, and what it has then."""
    counted: Counter[str] = Counter()
    lock = threading.Lock()

    def count(folder: LocalFolder, name: str, size_bytes: int) -> None:
        with lock:
            counted[name] += size_bytes

    keep = KeepLoaded()
    with reading(count):
        _fit(context, _trainer(context, parallel, 2, keep, shared_memory=shared_memory), path)
    return counted, keep.tensors


CASES: dict[str, tuple[Any, ...]] = {
    "ddp": ("ddp", "ddp", "auto", {"a": [0, 1], "b": [2, 3]}),
    "zero2": ("zero2", "zero2", "auto", {"a": [0, 1], "b": [2, 3]}),
    "ddp in turn": ("ddp", "ddp", "auto", {"a": [0, 2], "b": [1, 3]}),
    "ddp 3+1": ("ddp", "ddp", "auto", {"a": [0, 1, 2], "b": [3]}),
    "ddp without shared memory": ("ddp", "ddp", "off", {"a": [0, 1], "b": [2, 3]}),
    "zero2 without shared memory": ("zero2", "zero2", "off", {"a": [0, 1], "b": [2, 3]}),
    "zero3 from ddp": ("ddp", "zero3", "auto", {"a": [0, 1], "b": [2, 3]}),
    "ddp from zero2": ("zero2", "ddp", "auto", {"a": [0, 1], "b": [2, 3]}),
}


@pytest.mark.parametrize(
    ("saved", "loaded", "shared_memory", "layout"),
    sampled(CASES, always=["ddp", "zero2", "ddp without shared memory"]),
)
def test_each_host_reads_a_checkpoint_once(
    ranks: RankPool, tmp_path: Path, saved: Any, loaded: Any, shared_memory: str, layout: dict[str, list[int]]
) -> None:
    path = tmp_path / "a.ckpt"
    ranks.run(save, layout=TWO_HOSTS, args=(str(path), saved))
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    got = ranks.run(resume, layout=layout, args=(str(path), loaded, shared_memory))
    alone = ranks.run(resume, layout=FOUR_HOSTS, args=(str(path), loaded))  # each rank reads for itself
    for (_, tensors), (_, wanted) in zip(got, alone, strict=True):
        assert tensors
        assert len(tensors) == len(wanted)
        assert all(torch.equal(one, other) for one, other in zip(tensors, wanted, strict=True))
    for own in layout.values():
        counted = sum((got[rank][0] for rank in own), Counter[str]())
        assert sum(counted.values()) <= LIMIT * sum(sizes.values())
        (manifest,) = filter(is_manifest, sizes)
        assert counted[manifest] == sizes[manifest]
        read = [sum(got[rank][0].values()) for rank in own]
        if loaded == "ddp":  # all need all, but the random states of other ranks
            assert sum(counted.values()) >= 0.95 * sum(sizes.values())
            assert max(read) < 0.75 * sum(read) or len(own) == 1
    if loaded == "ddp":
        assert sum(sum(counted.values()) for counted, _ in alone) > 3.8 * sum(sizes.values())


# -- failures ----------------------------------------------------------------------------------------------------------


def fail_to_resume(context: RankContext, path: str, shared_memory: str) -> tuple[str, str]:
    trainer = _trainer(context, "ddp", 2, shared_memory=shared_memory)
    with pytest.raises(CheckpointError) as caught:
        _fit(context, trainer, path)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("shared_memory", ["auto", pytest.param("off", marks=pytest.mark.sweep)])
def test_damage_is_the_same_error_on_all_ranks(ranks: RankPool, tmp_path: Path, shared_memory: str) -> None:
    """A chunk that was changed; a manifest that only the first rank of a host reads; a file that is gone."""
    path = tmp_path / "a.ckpt"
    ranks.run(save, layout=TWO_HOSTS, args=(str(path), "ddp"))
    victim = next(path.glob("rank00002*"))
    whole = victim.read_bytes()

    def told() -> tuple[str, str]:
        said = ranks.run(fail_to_resume, layout=TWO_HOSTS, args=(str(path), shared_memory))
        assert len(set(said)) == 1
        return said[0]  # type: ignore[no-any-return]

    victim.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    kind, text = told()
    assert kind == "DamagedCheckpointError"
    assert f"{victim.name}: bytes 0 to" in text
    assert "crc32" in text
    victim.unlink()
    kind, text = told()
    assert kind == "DamagedCheckpointError"
    assert f"ranks 0, 2: {victim} is missing" in text
    victim.write_bytes(whole)
    manifest = next(path.glob("manifest-*"))
    manifest.write_bytes(b"{}")
    kind, text = told()
    assert kind == "DamagedCheckpointError"
    assert f"ranks 0, 2: {manifest} has 2 bytes" in text
