"""``checkpoint.snapshot=overlapped``: weights are copied while the next forward and backward run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_dist import AsyncShardedCheckpoint
from lightning_dist.build import copied_shares
from lightning_dist.checkpoint.catalog import Checkpoint, open_checkpoint
from lightning_dist.checkpoint.late_copy import LateCopy
from lightning_dist.checkpoint.storage import open_folder
from lightning_dist.checkpoint.whole import read_tensor
from lightning_dist.errors import CombinationError
from tests.distributed.lightning_runs import loader_of, strategy_of, trainer_on_pool
from tests.distributed.pipeline_runs import StageCase, StageLearner
from tests.distributed.sharded_runs import LAYOUTS
from tests.distributed.test_checkpoint_layouts import STRATEGIES
from tests.faults.fits import ending_of_fit
from tests.support.faults import InjectedError
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

OVERLAPPED = {"mode": "async_sharded", "snapshot": "overlapped"}
SAVES = 3
LIGHTNING = "lightning"


class Numbering(torch.optim.Optimizer):
    """Sets weights, and an entry of its state that is as large, to the number of its step."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.number = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]  # as torch's own
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.number += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                held = self.state[parameter].setdefault("held", torch.zeros_like(parameter))
                held.fill_(self.number)
                parameter.fill_(self.number)
        return result


class Numbered(StageLearner):
    """A model of any mode, trained by :class:`Numbering`."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Numbering(list(self.net.parameters()))


class Manual(Numbered):
    """The same under manual optimization."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


class LookAtCopies(pl.Callback):
    """How far copies have come whenever a backward has ended.

    Args:
        copied: Who has copied each piece until now.
    """

    def __init__(self, copied: list[str]) -> None:
        self.copied = copied
        self.after_backward: list[int] = []

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.after_backward.append(len(self.copied))


class SaveEachStep(pl.Callback):
    """Saves after each optimizer step but the last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved = 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self.saved < trainer.global_step <= SAVES:
            self.saved = trainer.global_step
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


@contextlib.contextmanager
def copying_slowly() -> Iterator[list[str]]:
    """Inside, all is late, and the thread that writes copies nothing before the one that trains waits for it.

    Yields:
        Who has copied each piece.
    """
    copied: list[str] = []
    is_waited_for = threading.Event()
    copy_piece, settle = LateCopy._copy_piece, LateCopy.settle

    def copy(self: LateCopy, source: Tensor, copy: Tensor) -> None:
        is_writer = threading.current_thread().name == "hierdist-checkpoint"
        if is_writer:
            is_waited_for.wait(30)
        copy_piece(self, source, copy)
        copied.append("writer" if is_writer else "trainer")

    def wait_for(self: LateCopy) -> None:
        is_waited_for.set()
        settle(self)
        is_waited_for.clear()

    with (
        patch.object(copied_shares, "_SMALL_BYTES", 0),
        patch.object(LateCopy, "_copy_piece", copy),
        patch.object(LateCopy, "settle", wait_for),
    ):
        yield copied


def _trainer(context: RankContext, folder: str, strategy: str, *callbacks: pl.Callback, **arguments: Any) -> pl.Trainer:
    """Saves after each step."""
    made: Any = DDPStrategy()
    save: pl.Callback = AsyncShardedCheckpoint(
        folder,
        checkpoint=OVERLAPPED,
        filename="{step}",
        auto_insert_metric_name=False,
        every_n_train_steps=1,
        save_top_k=-1,
    )
    if strategy != LIGHTNING:
        made, save = strategy_of(**STRATEGIES[strategy], checkpoint=OVERLAPPED), SaveEachStep(Path(folder))
    settings = {"limit_val_batches": 0, "enable_checkpointing": strategy == LIGHTNING, **arguments}
    return trainer_on_pool(context, made, callbacks=[*callbacks, save], **settings)


def save_slowly(context: RankContext, folder: str, strategy: str, kind: str, accumulation: int) -> dict[str, Any]:
    """Saves after each step, and one step more."""
    module = {"automatic": Numbered, "manual": Manual}[kind](StageCase(model="even", accumulation=accumulation))
    with copying_slowly() as copied:
        look = LookAtCopies(copied)
        steps = {"max_steps": SAVES + 1, "accumulate_grad_batches": accumulation}
        trainer = _trainer(context, folder, strategy, look, **steps)
        trainer.fit(module)
    return {
        "copied": copied,
        "after backward": look.after_backward,
        "hooks": sum(len(each._optimizer_step_pre_hooks) for each in trainer.optimizers),
    }


def held(checkpoint: Checkpoint, prefix: str) -> dict[str, Tensor]:
    names = [name for name in checkpoint.manifest.tensors if name.startswith(prefix)]
    return {name: read_tensor(checkpoint, name) for name in names}


CASES = {
    **{name: (name, "automatic", 1) for name in STRATEGIES},
    "manual": ("ddp", "manual", 1),
    "accumulating": ("zero2", "automatic", 2),
    "callback": (LIGHTNING, "automatic", 1),
    "callback, manual": (LIGHTNING, "manual", 1),
}


@pytest.mark.parametrize(
    ("strategy", "kind", "accumulation"), sampled(CASES, ("zero1", "pipeline", "accumulating", "callback, manual"))
)
def test_a_checkpoint_has_one_steps_values_however_late_they_are_copied(
    ranks: RankPool, tmp_path: Path, strategy: str, kind: str, accumulation: int
) -> None:
    layout = LAYOUTS["2+2" if "tensor" in strategy or strategy in ("hsdp", "pipeline zero1") else "2"]
    seen = ranks.run(save_slowly, layout=layout, args=(str(tmp_path), strategy, kind, accumulation))
    for each in seen:
        assert "trainer" in each["copied"]
        assert each["hooks"] == 0
        ends = each["after backward"][accumulation - 1 :: accumulation]
        assert len(ends) == SAVES + 1
        pieces = ends[-1] // (SAVES - 1)
        assert pieces > 0
        # The first save is not copied before the second backward has ended, the second not before the third has.
        assert ends == [0, *(number * pieces for number in range(SAVES))]
    for step in range(1, SAVES + 1):
        checkpoint = open_checkpoint(open_folder(tmp_path / f"{step}.ckpt"))
        for prefix in ("model/", "optimizer/"):
            values = held(checkpoint, prefix)
            assert values
            for name, value in values.items():
                assert bool((value == step).all()), (name, value)


class SaveInWindows(pl.Callback):
    """Saves after the first batch of each window of accumulation, before its step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % 2 == 0 and trainer.global_step:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def save_in_windows(context: RankContext, folder: str, strategy: str) -> int:
    with copying_slowly() as copied:
        made = strategy_of(**STRATEGIES[strategy], checkpoint=OVERLAPPED)
        settings = {"limit_val_batches": 0, "max_steps": SAVES + 1, "accumulate_grad_batches": 2}
        trainer = trainer_on_pool(context, made, callbacks=[SaveInWindows(Path(folder))], **settings)
        trainer.fit(Numbered(StageCase(model="even", accumulation=2)))
    return len(copied)


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "pipeline zero1"])
def test_a_save_inside_a_window_has_the_values_of_the_step_before(
    ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    """Where parameters are gathered all through a window, they are let go before its step; shards are copied."""
    layout = LAYOUTS["2+2" if strategy == "pipeline zero1" else "2"]
    assert all(ranks.run(save_in_windows, layout=layout, args=(str(tmp_path), strategy)))
    for step in range(1, SAVES + 1):
        checkpoint = open_checkpoint(open_folder(tmp_path / f"{step}.ckpt"), full=True)
        for name, value in {**held(checkpoint, "model/"), **held(checkpoint, "optimizer/")}.items():
            assert bool((value == step).all()), (name, value)


# -- what is not late --------------------------------------------------------------------------------------------------


class Normed(pl.LightningModule):
    """With statistics, which a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Numbering(list(self.parameters()))


class KeepBuffers(pl.Callback):
    """Those of each step's end."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.seen.append({name: value.clone() for name, value in pl_module.named_buffers()})


def save_statistics(context: RankContext, folder: str, strategy: str) -> list[dict[str, Tensor]]:
    batches = [torch.randn(5, 3, generator=torch.Generator().manual_seed(context.rank + 7 * i)) for i in range(4)]
    keep = KeepBuffers()
    with copying_slowly():
        _trainer(context, folder, strategy, keep, max_steps=SAVES + 1).fit(Normed(), loader_of(batches))
    return keep.seen


@pytest.mark.parametrize(
    "strategy",
    ["zero2", pytest.param("ddp", marks=pytest.mark.sweep), pytest.param(LIGHTNING, marks=pytest.mark.sweep)],
)
def test_statistics_are_those_of_the_moment(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    expected = ranks.run(save_statistics, world_size=2, args=(str(tmp_path), strategy))[0]
    assert not torch.equal(expected[0]["net.1.running_mean"], expected[1]["net.1.running_mean"])
    for step in range(1, SAVES + 1):
        checkpoint = open_checkpoint(open_folder(tmp_path / f"{step}.ckpt"))
        for name, value in expected[step - 1].items():
            assert torch.equal(read_tensor(checkpoint, f"model/{name}"), value), (step, name)


class Averaged(Numbered):
    """Keeps an average of weights beside them, changed after each step, and after callbacks have saved."""

    def __init__(self, case: StageCase) -> None:
        super().__init__(case)
        self.average = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.data.fill_(self.trainer.global_step)  # torch counts no change


def average_by_hand(context: RankContext, folder: str, strategy: str) -> None:
    with copying_slowly():
        _trainer(context, folder, strategy, max_steps=SAVES + 1).fit(Averaged(StageCase(model="even")))


@pytest.mark.parametrize("strategy", ["ddp", pytest.param(LIGHTNING, marks=pytest.mark.sweep)])
def test_frozen_weights_are_those_of_the_moment(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    ranks.run(average_by_hand, layout=LAYOUTS["2"], args=(str(tmp_path), strategy), fresh=True)
    for step in range(1, SAVES + 1):
        checkpoint = open_checkpoint(open_folder(tmp_path / f"{step}.ckpt"))
        assert read_tensor(checkpoint, "model/average").tolist() == [step - 1] * 4


# -- what goes wrong ---------------------------------------------------------------------------------------------------


class Change(pl.Callback):
    """Changes weights after the second save, on one rank; under ddp a rank copies its share of them only."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 1:
            with torch.no_grad():
                for parameter in pl_module.parameters():
                    parameter.mul_(2)


def change_weights(context: RankContext, folder: str, strategy: str) -> str:
    with copying_slowly():
        trainer = _trainer(context, folder, strategy, Change(), max_steps=SAVES + 1)
        return str(ending_of_fit(trainer, Numbered(StageCase(model="even")))["text"])


@pytest.mark.parametrize("strategy", ["zero2", LIGHTNING, pytest.param("ddp", marks=pytest.mark.sweep)])
def test_weights_that_were_changed_meanwhile_fail_the_save_on_all_ranks(
    ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    for text in ranks.run(change_weights, layout=LAYOUTS["2"], args=(str(tmp_path), strategy), fresh=True):
        assert text.startswith("CheckpointError: saving "), text
        assert "rank 1: model/net." in text
        assert "was changed in place" in text
        assert "write checkpoint.snapshot=at_once" in text
    assert open_checkpoint(open_folder(tmp_path / "1.ckpt")).manifest.record["step"] == 1
    assert not (tmp_path / "2.ckpt" / "COMMITTED").exists()


class Raising(Numbered):
    """Raises in a step while the save before is being copied."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise InjectedError("the user's own")
        return super().training_step(batch, batch_idx)


def raise_while_copying(context: RankContext, folder: str, strategy: str) -> dict[str, Any]:
    with copying_slowly():
        module = Raising(StageCase(model="even"))
        trainer = _trainer(context, folder, strategy, max_steps=SAVES + 1)
        ending = ending_of_fit(trainer, module)
    left = [each.name for each in threading.enumerate() if each.name.startswith("hierdist")]
    hooks = sum(len(each._optimizer_step_pre_hooks) for each in trainer.optimizers)
    return {"text": ending["text"], "threads": left, "hooks": hooks}


@pytest.mark.parametrize("strategy", ["zero2", LIGHTNING, pytest.param("ddp", marks=pytest.mark.sweep)])
def test_a_step_that_raises_leaves_a_whole_checkpoint_and_no_thread(
    ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    for each in ranks.run(raise_while_copying, layout=LAYOUTS["2"], args=(str(tmp_path), strategy), fresh=True):
        assert each["text"] == "InjectedError: the user's own"
        assert (each["threads"], each["hooks"]) == ([], 0)
    checkpoint = open_checkpoint(open_folder(tmp_path / "2.ckpt"), full=True)
    for name, value in held(checkpoint, "model/").items():
        assert bool((value == 2).all()), name


def test_a_callback_that_changes_weights_between_steps_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    for text in ranks.run(average_weights, world_size=1, args=(str(tmp_path),), fresh=True):
        assert "StochasticWeightAveraging changes weights between steps" in text
        assert "write checkpoint.snapshot=at_once" in text


def average_weights(context: RankContext, folder: str) -> str:
    trainer = _trainer(context, folder, "ddp", StochasticWeightAveraging(swa_lrs=0.1), max_epochs=2)
    with pytest.raises(CombinationError) as raised:
        trainer.fit(Numbered(StageCase(model="even")))
    return str(raised.value)
