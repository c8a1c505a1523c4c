"""Lightning's habits with sharded checkpoints: weights alone, the middle of an epoch, validation, ``hpc``, tests."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_dist import AsyncShardedCheckpoint
from lightning_dist.checkpoint.catalog import open_checkpoint, survey
from lightning_dist.checkpoint.save_ids import manifest_file, next_save_id
from lightning_dist.checkpoint.storage import open_folder
from tests.distributed.lightning_runs import ListDataset, strategy_of, trainer_on_pool
from tests.distributed.pipeline_runs import STEPS, StageCase, StageLearner
from tests.distributed.test_checkpoint_layouts import STRATEGIES
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

CASE = StageCase(optimizer="adamw")


def _trainer(context: RankContext, name: str, *callbacks: pl.Callback, **arguments: Any) -> pl.Trainer:
    strategy = strategy_of(**STRATEGIES[name], checkpoint="async_sharded")
    keeps = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    settings = {"limit_val_batches": 0, "enable_checkpointing": keeps, **arguments}
    return trainer_on_pool(context, strategy, callbacks=list(callbacks), **settings)


# -- weights alone -----------------------------------------------------------------------------------------------------


def save_weights(context: RankContext, folder: str, name: str) -> str:
    """Train, keep the weights, and say how resuming from them fails."""
    keep = AsyncShardedCheckpoint(folder, filename="weights", save_weights_only=True)
    _trainer(context, name, keep).fit(StageLearner(CASE))
    with pytest.raises(KeyError) as raised:
        _trainer(context, name, max_epochs=2).fit(StageLearner(CASE), ckpt_path=f"{folder}/weights.ckpt")
    module = StageLearner(CASE)
    _trainer(context, name, limit_test_batches=1).test(module, ckpt_path=f"{folder}/weights.ckpt", verbose=False)
    return str(raised.value)


@pytest.mark.parametrize("name", ["zero2", pytest.param("pipeline", marks=pytest.mark.sweep)])
def test_weights_alone_are_tested_and_not_resumed(ranks: RankPool, tmp_path: Path, name: str) -> None:
    for said in ranks.run(save_weights, world_size=2, args=(str(tmp_path), name), fresh=True):
        assert "only the model" in said or "contains only" in said, said  # Lightning's own words
    manifest = open_checkpoint(open_folder(tmp_path / "weights.ckpt"), full=True).manifest
    assert {entry.partition("/")[0] for entry in manifest.tensors} == {"model"}
    assert not [entry for entry in manifest.objects if entry.startswith("optimizer")]


# -- the middle of an epoch --------------------------------------------------------------------------------------------


class StatefulLearner(StageLearner):
    """Its loader knows where it is; a plain one begins anew, whatever Lightning counts."""

    def train_dataloader(self) -> Any:
        batches = self.case.batches(int(self.trainer.distributed_sampler_kwargs["rank"]))
        return StatefulDataLoader(ListDataset(batches), batch_size=None)


class Watch(pl.Callback):
    """What each training batch was, and what it gave."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int, float]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.append((trainer.current_epoch, batch_idx, trainer.global_step, float(outputs["loss"])))


class SaveInValidation(pl.Callback):
    """Saves in the first batch of the first validation, which is in the middle of an epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_done = False

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if not self.is_done:
            self.is_done = True
            trainer.save_checkpoint(self.path)


def interrupt_and_go_on(context: RankContext, folder: str, name: str, where: str) -> tuple[list[Any], list[Any]]:
    """Two epochs at once, saving in the middle of the first, and what a resumed run makes of the rest."""
    straight, resumed = Watch(), Watch()
    options: dict[str, Any] = {"max_epochs": 2}
    if where == "validation":
        options |= {"limit_val_batches": 2, "val_check_interval": 2}
        keep: pl.Callback = SaveInValidation(Path(folder) / "middle.ckpt")
    else:
        keep = AsyncShardedCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    path = f"{folder}/middle.ckpt" if where == "validation" else f"{folder}/step=3.ckpt"
    _trainer(context, name, keep, straight, **options).fit(StatefulLearner(CASE))
    _trainer(context, name, resumed, **options).fit(StatefulLearner(CASE), ckpt_path=path)
    return straight.seen, resumed.seen


@pytest.mark.parametrize(
    ("name", "where", "done"),
    [
        ("ddp", "steps", 3),
        ("zero3", "validation", 2),
        ("pipeline", "steps", 3),
        pytest.param("zero2", "steps", 3, marks=pytest.mark.sweep),
        pytest.param("ddp", "validation", 2, marks=pytest.mark.sweep),
        pytest.param("pipeline", "validation", 2, marks=pytest.mark.sweep),
    ],
)
def test_the_middle_of_an_epoch_goes_on_where_it_was(
    ranks: RankPool, tmp_path: Path, name: str, where: str, done: int
) -> None:
    """Equal, not close: the same sums in the same order."""
    for straight, resumed in ranks.run(interrupt_and_go_on, world_size=2, args=(str(tmp_path), name, where)):
        assert [each[2] for each in straight] == list(range(1, 2 * STEPS + 1))
        assert resumed == straight[done:]


def save_in_the_middle(context: RankContext, folder: str) -> None:
    keep = AsyncShardedCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    _trainer(context, "ddp", keep).fit(StatefulLearner(CASE))


def go_on_alone(context: RankContext, folder: str) -> list[tuple[int, int, int]]:
    watch = Watch()
    _trainer(context, "ddp", watch, max_epochs=2).fit(StatefulLearner(CASE), ckpt_path=f"{folder}/step=3.ckpt")
    return [each[:3] for each in watch.seen]


def test_at_another_size_loaders_go_on_where_rank_0_was(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_in_the_middle, world_size=2, args=(str(tmp_path),))
    (seen,) = ranks.run(go_on_alone, world_size=1, args=(str(tmp_path),))
    assert seen == [(0, 3, 4), *((1, index, STEPS + 1 + index) for index in range(STEPS))]


# -- hpc ---------------------------------------------------------------------------------------------------------------


class SaveForThePreempted(pl.Callback):
    """What a preempted run leaves in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for number in (1, 2):
            trainer.save_checkpoint(self.folder / f"hpc_ckpt_{number}.ckpt")


def preempt_and_go_on(context: RankContext, folder: str) -> tuple[int, str]:
    root = {"default_root_dir": folder}
    _trainer(context, "zero2", SaveForThePreempted(Path(folder)), **root).fit(StageLearner(CASE))
    again = _trainer(context, "zero2", max_epochs=2, **root)
    again.fit(StageLearner(CASE), ckpt_path="hpc")
    return again.global_step, str(again.ckpt_path)


def test_a_preempted_run_goes_on_from_its_last_folder(ranks: RankPool, tmp_path: Path) -> None:
    for step, path in ranks.run(preempt_and_go_on, world_size=2, args=(str(tmp_path),)):
        assert step == 2 * STEPS
        assert path.endswith("hpc_ckpt_2.ckpt")


# -- URLs --------------------------------------------------------------------------------------------------------------


def save_to_url(context: RankContext, url: str) -> dict[str, Any]:
    """Three epochs and a fourth one; what was kept."""

    def prepared(epochs: int) -> tuple[pl.Trainer, ModelCheckpoint]:
        keep = AsyncShardedCheckpoint(url, monitor="step", mode="max", save_top_k=2, filename="{step}")
        return _trainer(context, "zero2", keep, max_epochs=epochs), keep

    first, keep = prepared(3)
    first.fit(StageLearner(CASE))
    second, again = prepared(4)
    second.fit(StageLearner(CASE), ckpt_path=keep.best_model_path)
    files = fsspec.filesystem(url.partition(":")[0])
    there = sorted(Path(path).name for path in files.ls(url, detail=False))
    problems = [entry.problem for entry in survey(open_folder(url), full=True)]
    if url.startswith("memory://"):
        files.rm(url, recursive=True)
    return {"step": second.global_step, "there": there, "problems": problems, "best": Path(again.best_model_path).name}


@pytest.mark.parametrize(("scheme", "world_size"), [("memory", 1), ("file", 2)])
def test_urls_hold_folders(ranks: RankPool, tmp_path: Path, scheme: str, world_size: int) -> None:
    url = "memory://habits" if scheme == "memory" else f"file://{tmp_path}/habits"
    for result in ranks.run(save_to_url, world_size=world_size, args=(url,)):
        assert result == {
            "step": 4 * STEPS,
            "there": ["step=12.ckpt", "step=16.ckpt"],
            "problems": [None, None],
            "best": "step=16.ckpt",
        }


def go_on_from_last(context: RankContext, url: str) -> dict[str, Any]:
    """Two fits into a folder, the second from the last of the first; a save that was cut off is the newest there."""
    for epochs in (2, 3):
        keep = AsyncShardedCheckpoint(url, monitor="step", mode="max", save_top_k=2, filename="{step}", save_last=True)
        watch = Watch()
        trainer = _trainer(context, "ddp", keep, watch, max_epochs=epochs)
        trainer.fit(StageLearner(CASE), ckpt_path="last")
        if context.rank == 0:
            left = manifest_file(next_save_id([], now_s=1.0, token=1))
            open_folder(f"{url}/last-v1.ckpt").write(left, [b"{}"])
    there = sorted(open_folder(url).list())
    if url.startswith("memory://"):
        fsspec.filesystem("memory").rm(url, recursive=True)
    return {"steps": [step for _, _, step, _ in watch.seen], "there": there}


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_folder_where_a_save_begins_is_not_the_last(tmp_path: Path, scheme: str) -> None:
    url = "memory://begun" if scheme == "memory" else f"{tmp_path}/begun"
    keep = AsyncShardedCheckpoint(url)
    strategy = strategy_of(**STRATEGIES["ddp"], checkpoint="async_sharded")
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, callbacks=[keep], logger=False)
    keep.setup(trainer, StageLearner(CASE), "fit")
    files, root = fsspec.url_to_fs(url)
    files.mkdirs(f"{root}/last-v1.ckpt")
    files.mkdirs(f"{root}/last-v2.ckpt")
    files.pipe_file(f"{root}/last-v2.ckpt/rank.bin.0a1b.partial", b"some")
    files.mkdirs(f"{root}/last-v3.ckpt")
    files.pipe_file(f"{root}/last-v3.ckpt/of_another_library", b"some")
    files.pipe_file(f"{root}/last.ckpt", b"plain")
    found = sorted(Path(path).name for path in keep._find_last_checkpoints(trainer))
    assert found == ["last-v3.ckpt", "last.ckpt"]


def load_last(context: RankContext, folder: str) -> tuple[str, int]:
    """Fit, then go on from what each rank takes for the last, which ranks see differently."""
    keep = AsyncShardedCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=STEPS)
    _trainer(context, "ddp", keep, max_epochs=2).fit(StageLearner(CASE))
    path = f"{folder}/step={(2 - context.rank) * STEPS}.ckpt"
    watch = Watch()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _trainer(context, "ddp", watch, max_epochs=3).fit(StageLearner(CASE), ckpt_path=path)
    return "\n".join(str(each.message) for each in told), watch.seen[0][2]


def test_ranks_that_see_other_checkpoints_load_that_of_rank_0(ranks: RankPool, tmp_path: Path) -> None:
    said = ranks.run(load_last, world_size=2, args=(str(tmp_path),))
    assert [step for _, step in said] == [2 * STEPS + 1] * 2
    assert f"this rank had found {tmp_path}/step={STEPS}.ckpt: it loads {tmp_path}/step={2 * STEPS}.ckpt" in said[1][0]
    assert "had found" not in said[0][0]


@pytest.mark.parametrize(("scheme", "world_size"), [("memory", 1), ("file", 2)])
def test_the_last_of_a_url_is_found(ranks: RankPool, tmp_path: Path, scheme: str, world_size: int) -> None:
    url = "memory://lasts" if scheme == "memory" else f"file://{tmp_path}/lasts"
    for result in ranks.run(go_on_from_last, world_size=world_size, args=(url,)):
        assert result["steps"] == list(range(2 * STEPS + 1, 3 * STEPS + 1))
        assert result["there"] == ["last-v1.ckpt", "last.ckpt", "step=12.ckpt", "step=8.ckpt"]


def test_a_link_to_the_last_is_refused_at_a_url(tmp_path: Path) -> None:
    keep = AsyncShardedCheckpoint("memory://links", save_last="link")
    trainer = pl.Trainer(accelerator="cpu", devices=1, callbacks=[keep], logger=False)
    with pytest.raises(ValueError, match="only supported for local file paths, got `dirpath=memory://links`"):
        keep.setup(trainer, StageLearner(CASE), "fit")


# -- tests of folders --------------------------------------------------------------------------------------------------


def losses_of_a_folder(context: RankContext, folder: str, name: str) -> tuple[float, float]:
    """Loss of the weights as they were trained, and of the folder in a new model."""
    keep = AsyncShardedCheckpoint(folder, filename="end")
    trained = StageLearner(CASE)
    _trainer(context, name, keep).fit(trained)
    fresh = StageLearner(CASE)
    losses = [
        float(_trainer(context, name).test(module, ckpt_path=path, verbose=False)[0]["val_loss"])
        for module, path in ((trained, None), (fresh, f"{folder}/end.ckpt"))
    ]
    return losses[0], losses[1]


@pytest.mark.parametrize("name", ["ddp", "zero3", "pipeline"])
def test_testing_a_folder_is_testing_its_weights(ranks: RankPool, tmp_path: Path, name: str) -> None:
    for trained, loaded in ranks.run(losses_of_a_folder, world_size=2, args=(str(tmp_path), name)):
        assert trained == loaded
