"""The newest checkpoint in memory: it outlives the ranks, and a run that starts again reads it instead of storage."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_dist import AsyncShardedCheckpoint
from lightning_dist.build.replicas import Mirror, Replicas
from lightning_dist.checkpoint.catalog import survey
from lightning_dist.checkpoint.keeper import client
from lightning_dist.checkpoint.local_disk import LocalFolder
from lightning_dist.checkpoint.manifest import parse
from lightning_dist.checkpoint.save_ids import is_manifest
from lightning_dist.checkpoint.storage import open_folder
from lightning_dist.errors import CombinationError
from tests.distributed.lightning_runs import strategy_of, trainer_on_pool
from tests.distributed.pipeline_runs import StageCase, StageLearner
from tests.support.keepers import ending_keepers
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

REPLICA = {"mode": "async_sharded", "replica": "memory", "replica_limit": "64MB"}


@contextlib.contextmanager
def refusing_reads() -> Iterator[None]:
    """Inside, whoever looks into a folder on disk fails."""

    def refuse(self: LocalFolder, *_: Any) -> Any:
        raise AssertionError(f"{self.url} is read")

    with contextlib.ExitStack() as patches:
        for name in ("read", "read_into", "list"):
            patches.enter_context(patch.object(LocalFolder, name, refuse))
        yield


def _trainer(context: RankContext, parallel: Any, checkpoint: Any, epochs: int, *callbacks: pl.Callback) -> pl.Trainer:
    strategy = strategy_of(parallel=parallel, checkpoint=checkpoint)
    sizes = {"limit_train_batches": 2, "limit_val_batches": 0}
    return trainer_on_pool(context, strategy, callbacks=list(callbacks), max_epochs=epochs, **sizes)


class Interrupted(Exception):
    pass


class SaveEachEpoch(pl.Callback):
    """Saves; after the save of one step, once it is committed, training fails."""

    def __init__(self, folder: str, *, fails_at: int | None = None) -> None:
        self.folder = folder
        self.fails_at = fails_at

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(f"{self.folder}/{trainer.global_step}.ckpt")
        if trainer.global_step == self.fails_at:
            trainer.strategy._saver.finish()
            raise Interrupted


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def train(
    context: RankContext, folder: str, parallel: Any, others: dict[str, Any] | None = None, model: str = "odd"
) -> None:
    """Two epochs of three, and a checkpoint after each."""
    trainer = _trainer(context, parallel, {**REPLICA, **(others or {})}, 3, SaveEachEpoch(folder, fails_at=4))
    with pytest.raises(Interrupted):
        trainer.fit(StageLearner(StageCase(model=model, optimizer="adamw")))


def go_on(
    context: RankContext, path: str, parallel: Any, reads_storage: bool, model: str = "odd"
) -> tuple[dict[str, torch.Tensor], int]:
    checkpoint = "async_sharded" if reads_storage else REPLICA
    module = StageLearner(StageCase(model=model, optimizer="adamw"))
    trainer = _trainer(context, parallel, checkpoint, 3)
    with contextlib.nullcontext() if reads_storage else refusing_reads():
        trainer.fit(module, ckpt_path=path)
    return weights_of(module), trainer.global_step


@pytest.mark.parametrize("parallel", ["ddp", "zero2"])
def test_a_run_goes_on_from_memory_and_leaves_storage_alone(ranks: RankPool, tmp_path: Path, parallel: str) -> None:
    with ending_keepers(tmp_path):
        ranks.run(train, world_size=2, args=(str(tmp_path), parallel))
        keeper = client.find(client.name_of(str(tmp_path)))
        assert keeper is not None
        assert [name.partition("@")[0] for name in keeper.folders()] == ["4.ckpt"]  # the last one only
        assert keeper.about()["used_bytes"] < 1.1 * sum(path.stat().st_size for path in (tmp_path / "4.ckpt").iterdir())
        expected = ranks.run(go_on, world_size=2, args=(str(tmp_path / "4.ckpt"), parallel, True))
        for path in ("4.ckpt", "last.ckpt"):
            for got, wanted in zip(
                ranks.run(go_on, world_size=2, args=(str(tmp_path / path), parallel, False)), expected, strict=True
            ):
                assert got[1] == wanted[1] == 6
                for name, value in wanted[0].items():
                    assert torch.equal(got[0][name], value), name


def train_without_a_buddy(context: RankContext, folder: str) -> int | None:
    """The save of step 4 does not come to rank 1's buddy; what counts as kept then."""
    spread = Replicas.spread

    def fail(self: Replicas, mirror: Mirror) -> bool:
        return spread(self, mirror) and not (context.rank == 1 and mirror.name.startswith("4.ckpt"))

    kept: list[int | None] = []
    at_the_end = pl.callbacks.LambdaCallback(on_exception=lambda trainer, *_: kept.append(trainer.strategy.kept_step))
    trainer = _trainer(context, "ddp", REPLICA, 3, SaveEachEpoch(folder, fails_at=4), at_the_end)
    with patch.object(Replicas, "spread", fail), pytest.raises(Interrupted):
        trainer.fit(StageLearner(StageCase(model="odd", optimizer="adamw")))
    return kept[0]


def test_the_snapshot_before_stays_where_a_rank_has_no_buddy_for_the_newest(ranks: RankPool, tmp_path: Path) -> None:
    """The loss of a host would leave nothing else; and nobody stops on what is in memory."""
    with ending_keepers(tmp_path):
        assert ranks.run(train_without_a_buddy, world_size=2, args=(str(tmp_path),)) == [None, None]
        keeper = client.find(client.name_of(str(tmp_path)))
        assert keeper is not None
        assert sorted(name.partition("@")[0] for name in keeper.folders()) == ["2.ckpt", "4.ckpt"]


PIPELINE = {"mode": "pipeline", "pipeline": {"size": 2}}
TENSOR = {"mode": "tensor", "tensor": {"size": 2}}
BOTH = {**PIPELINE, "tensor": {"size": 2}}
OTHER_LAYOUTS: dict[str, tuple[Any, ...]] = {
    "pipeline": (PIPELINE, 2, PIPELINE, 2),
    "tensor": (TENSOR, 2, TENSOR, 2),
    "zero2 on half as many ranks": ("zero2", 4, "zero2", 2),
    "zero2 on twice as many ranks": ("zero2", 2, "zero2", 4),
    "pipeline with tensor": (BOTH, 4, BOTH, 4),
    "pipeline, then ddp on half as many ranks": (PIPELINE, 4, "ddp", 2),
    "zero3, then tensor on half as many ranks": ("zero3", 4, TENSOR, 2),
    "ddp, then one rank": ("ddp", 2, "ddp", 1),
}


@pytest.mark.parametrize(
    ("first", "ranks_first", "then", "ranks_then"),
    sampled(OTHER_LAYOUTS, always=["pipeline", "tensor", "zero2 on half as many ranks"]),
)
def test_any_layout_goes_on_from_memory(
    ranks: RankPool, tmp_path: Path, first: Any, ranks_first: int, then: Any, ranks_then: int
) -> None:
    path = str(tmp_path / "4.ckpt")
    with ending_keepers(tmp_path):
        ranks.run(train, world_size=ranks_first, args=(str(tmp_path), first, None, "even"))
        expected = ranks.run(go_on, world_size=ranks_then, args=(path, then, True, "even"))
        got = ranks.run(go_on, world_size=ranks_then, args=(path, then, False, "even"))
    for (weights, step), (wanted, _) in zip(got, expected, strict=True):
        assert step == 6
        for name, value in wanted.items():
            assert torch.equal(weights[name], value), name


def test_what_is_not_in_memory_is_read_from_storage(ranks: RankPool, tmp_path: Path) -> None:
    with ending_keepers(tmp_path):
        ranks.run(train, world_size=2, args=(str(tmp_path), "ddp"))
        with pytest.raises(Exception, match="is read"):
            ranks.run(go_on, world_size=2, args=(str(tmp_path / "2.ckpt"), "ddp", False))
    expected = ranks.run(go_on, world_size=2, args=(str(tmp_path / "2.ckpt"), "ddp", True))
    assert [step for _, step in expected] == [6, 6]
    assert os.listdir(tmp_path)


class SaveMore(SaveEachEpoch):
    """Saves what no run goes on from, or not here, and at the end as before a requeueing."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(f"{self.folder}/whole.ckpt")
        trainer.save_checkpoint(f"{self.folder}/weights.ckpt", weights_only=True)
        with contextlib.ExitStack() as said:
            if trainer.global_step == 2:  # once
                said.enter_context(pytest.warns(UserWarning, match=r"else/whole.ckpt is not kept in memory"))
            trainer.save_checkpoint(f"{self.folder}/else/whole.ckpt", weights_only=True)
            trainer.save_checkpoint(f"{self.folder}/else/whole.ckpt")
        trainer.strategy._saver.finish()
        if trainer.global_step == self.fails_at:
            raise Interrupted


class SavePreempted(SaveEachEpoch):
    """Saves as before a requeueing."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with trainer.strategy._saving_at_once():
            trainer.save_checkpoint(f"{self.folder}/hpc_ckpt_1.ckpt")
        raise Interrupted


def train_and_save_more(context: RankContext, folder: str) -> None:
    trainer = _trainer(context, "zero2", REPLICA, 3, SaveMore(folder, fails_at=4))
    with pytest.raises(Interrupted):
        trainer.fit(StageLearner(StageCase(optimizer="adamw")))


def train_and_be_preempted(context: RankContext, folder: str) -> None:
    trainer = _trainer(context, "zero2", REPLICA, 3, SavePreempted(folder))
    with pytest.raises(Interrupted):
        trainer.fit(StageLearner(StageCase(optimizer="adamw")))


def test_only_what_a_run_goes_on_from_is_kept(ranks: RankPool, tmp_path: Path) -> None:
    with ending_keepers(tmp_path):
        ranks.run(train_and_save_more, world_size=2, args=(str(tmp_path),))
        keeper = client.find(client.name_of(str(tmp_path)))
        assert keeper is not None
        assert [name.partition("@")[0] for name in keeper.folders()] == ["whole.ckpt"]
        for path in ("whole.ckpt", "last.ckpt"):
            got = ranks.run(go_on, world_size=2, args=(str(tmp_path / path), "zero2", False))
            assert [step for _, step in got] == [6, 6]


def test_a_preempted_run_goes_on_from_memory(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "hpc_ckpt_1.ckpt"
    with ending_keepers(tmp_path):
        ranks.run(train_and_be_preempted, world_size=2, args=(str(tmp_path),))
        assert (path / "COMMITTED").exists()
        got = ranks.run(go_on, world_size=2, args=(str(path), "zero2", False))
    assert [step for _, step in got] == [6, 6]


def train_to_the_end(context: RankContext, folder: str) -> None:
    _trainer(context, "ddp", REPLICA, 2, SaveEachEpoch(folder)).fit(StageLearner(StageCase(optimizer="adamw")))


def test_a_training_that_ends_well_leaves_nothing_in_memory(ranks: RankPool, tmp_path: Path) -> None:
    with ending_keepers(tmp_path):
        ranks.run(train_to_the_end, world_size=2, args=(str(tmp_path),))
        assert client.find(client.name_of(str(tmp_path))) is None
    assert [entry.problem for entry in survey(open_folder(tmp_path), full=True)] == [None, None]


def train_alone(context: RankContext, folder: str) -> None:
    with pytest.warns(UserWarning, match="buddy does no more than memory"):
        train(context, folder, "ddp", {"replica": "buddy"})


def test_a_buddy_needs_another_host(ranks: RankPool, tmp_path: Path) -> None:
    with ending_keepers(tmp_path):
        ranks.run(train_alone, world_size=1, args=(str(tmp_path),))
        keeper = client.find(client.name_of(str(tmp_path)))
        assert keeper is not None
        assert [name.partition("@")[0] for name in keeper.folders()] == ["4.ckpt"]


def save_without_replicas(context: RankContext, folder: str) -> None:
    train(context, folder, "ddp", {"replica": "off"})


def test_what_a_run_without_replicas_writes_makes_the_memory_old(ranks: RankPool, tmp_path: Path) -> None:
    with ending_keepers(tmp_path):
        ranks.run(train, world_size=2, args=(str(tmp_path), "ddp"))
        assert client.find(client.name_of(str(tmp_path))) is not None
        ranks.run(save_without_replicas, world_size=2, args=(str(tmp_path),))
        assert client.find(client.name_of(str(tmp_path))) is None


def damage(context: RankContext, folder: str, prefix: str) -> None:
    """One bit of each chunk of such tensors in what rank 1 wrote, in memory."""
    keeper = client.find(client.name_of(folder))
    if context.rank or keeper is None:
        return
    (kept,) = keeper.folders()
    (said,) = filter(is_manifest, keeper.list(kept))
    manifest = parse(keeper.read(kept, said) or b"", said)
    (name,) = (each for each in manifest.files if each.startswith("rank00001"))
    data = bytearray(keeper.read(kept, name) or b"")
    for tensor, entry in manifest.tensors.items():
        for chunk in entry.chunks:
            if tensor.startswith(prefix) and chunk.place.file == name:
                data[chunk.place.start] ^= 1
    assert data != keeper.read(kept, name)
    keeper.write(kept, name, [data])


def go_on_in_spite(context: RankContext, path: str) -> tuple[dict[str, torch.Tensor], int]:
    module = StageLearner(StageCase(optimizer="adamw"))
    trainer = _trainer(context, "ddp", REPLICA, 3)
    with pytest.warns(UserWarning, match=r"is read from storage: .*rank00001.* are not what was written"):
        trainer.fit(module, ckpt_path=path)
    return weights_of(module), trainer.global_step


@pytest.mark.parametrize("prefix", ["model/", "optimizer/"])
def test_damaged_memory_is_not_used(ranks: RankPool, tmp_path: Path, prefix: str) -> None:
    path = str(tmp_path / "4.ckpt")
    with ending_keepers(tmp_path):
        ranks.run(train, world_size=2, args=(str(tmp_path), "ddp"))
        expected = ranks.run(go_on, world_size=2, args=(path, "ddp", True))
        ranks.run(damage, world_size=2, args=(str(tmp_path), prefix))
        got = ranks.run(go_on_in_spite, world_size=2, args=(path,))
    for (weights, step), (wanted, _) in zip(got, expected, strict=True):
        assert step == 6
        for name, value in wanted.items():
            assert torch.equal(weights[name], value), name


def test_a_strategy_that_does_not_resume_from_memory_is_refused() -> None:
    callback = AsyncShardedCheckpoint(checkpoint=REPLICA)
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=DDPStrategy(), callbacks=[callback], logger=False)
    with pytest.raises(CombinationError, match=r"checkpoint\.replica=memory with DDPStrategy"):
        callback.setup(trainer, StageLearner(StageCase()), "fit")
