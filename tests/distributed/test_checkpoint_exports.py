"""Lightning's own file, written from a folder: Lightning alone takes it as if it had saved it itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from safetensors import safe_open

from lightning_dist.checkpoint.sharded import save
from lightning_dist.checkpoint.storage import open_folder
from lightning_dist.cli import main
from tests.distributed.lightning_runs import OddModule, adamw, loader_of, make_batches, strategy_of, trainer_on_pool
from tests.distributed.sharded_runs import TiedNet
from tests.distributed.test_checkpoint_layouts import SaveAtEnd
from tests.support.processes import clean_environment
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

BATCHES = 4


class Scheduled(OddModule):
    """Has a schedule, tied weights and a hyper-parameter."""

    def __init__(self, decay: float = 0.5) -> None:
        super().__init__(adamw)
        self.again = self.net[0]
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, self.hparams["decay"])]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss


def _callbacks() -> list[pl.Callback]:
    return [EarlyStopping("loss", patience=9, check_on_train_epoch_end=True)]


def save_both(context: RankContext, folder: str, parallel: str) -> None:
    """An epoch, saved in Lightning's way and as a folder."""
    for mode in ("full", "async_sharded"):
        callbacks = [*_callbacks(), SaveAtEnd(Path(folder) / mode)]
        trainer = trainer_on_pool(
            context, strategy_of(parallel=parallel, checkpoint=mode), callbacks=callbacks, limit_val_batches=0
        )
        trainer.fit(Scheduled(), loader_of(make_batches(2, BATCHES)[context.rank]))


def go_on_alone(context: RankContext, path: str) -> tuple[list[float], dict[str, Any]]:
    """A second epoch by Lightning alone."""
    module = Scheduled()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=_callbacks(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(module, loader_of(make_batches(2, BATCHES)[0]), ckpt_path=path)
    stopping = trainer.early_stopping_callback
    assert stopping is not None
    state = {"step": trainer.global_step, "lr": trainer.optimizers[0].param_groups[0]["lr"], **stopping.state_dict()}
    return module.losses, {**state, **module.state_dict()}


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Equal to the bit, at any depth."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, Mapping):
        assert set(one) == set(other), where
        for key, value in one.items():
            assert_same(value, other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, value in enumerate(one):
            assert_same(value, other[index], f"{where}/{index}")
    else:
        assert one == other, where


@pytest.mark.parametrize("parallel", ["zero2", pytest.param("ddp", marks=pytest.mark.sweep)])
def test_lightning_alone_goes_on_from_an_exported_file(ranks: RankPool, tmp_path: Path, parallel: str) -> None:
    ranks.run(save_both, world_size=2, args=(str(tmp_path), parallel))
    exported = tmp_path / "exported.ckpt"
    assert main(["checkpoint", "export", str(tmp_path / "async_sharded"), str(exported)]) == 0
    own, other = (torch.load(path, weights_only=True) for path in (tmp_path / "full", exported))
    assert_same(own, other)
    assert other["optimizer_states"][0]["state"]
    assert other["lr_schedulers"]
    assert other["callbacks"]
    (losses, state), (other_losses, other_state) = (
        ranks.run(go_on_alone, world_size=1, args=(str(path),), init_group=False)[0]
        for path in (tmp_path / "full", exported)
    )
    assert len(losses) == BATCHES
    assert losses == other_losses
    assert state["step"] == 2 * BATCHES
    assert_same(state, other_state)


def test_weights_alone_are_a_file_that_gives_the_module(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_both, world_size=2, args=(str(tmp_path), "zero2"))
    exported = tmp_path / "weights.ckpt"
    arguments = ["checkpoint", "export", str(tmp_path / "async_sharded"), str(exported), "--weights-only"]
    assert main(arguments) == 0
    own, other = (torch.load(path, weights_only=True) for path in (tmp_path / "full", exported))
    assert set(own) - set(other) == {"optimizer_states", "lr_schedulers", "callbacks"}
    module = Scheduled.load_from_checkpoint(exported)
    assert module.hparams["decay"] == 0.5
    assert module.again is module.net[0]
    assert_same(dict(module.state_dict()), own["state_dict"])


def test_what_cannot_be_exported_so_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {f"net.{name}": value for name, value in TiedNet().state_dict().items()}
    save(state, open_folder(tmp_path / "c"), rank=0, host="h")
    torch.save({"state_dict": state}, tmp_path / "a.ckpt")
    output = str(tmp_path / "b.ckpt")
    for arguments, said in (
        ([str(tmp_path / "c"), output], "was not saved by a Trainer; of its tensors, net."),
        ([str(tmp_path / "a.ckpt"), output], "is one file already: write e.g."),
        ([str(tmp_path / "c"), output, "--prefix", "net.", "--weights-only"], "leave it out"),
        ([str(tmp_path / "c"), str(tmp_path / "b.safetensors"), "--weights-only"], "leave it out"),
    ):
        assert main(["checkpoint", "export", *arguments]) == 2
        assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "c"]


# -- memory ------------------------------------------------------------------------------------------------------------

SIZE_BYTES = 400 << 20
ALLOWED_BYTES = 150 << 20
EXPORT = """
import sys
from pathlib import Path
from lightning_dist.cli import main

def peak():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))) << 10

assert main(["checkpoint", "export", sys.argv[1], sys.argv[2], *sys.argv[4:]]) == 0  # all is imported by now
before = peak()
assert main(["checkpoint", "export", sys.argv[1].replace("small", "large"), sys.argv[3], *sys.argv[4:]]) == 0
print("grown", peak() - before)
"""


def save_net(folder: Path, rows: int) -> None:
    """A large tensor and smaller ones; as a Trainer names them."""
    values = torch.arange(1024, dtype=torch.float32)
    weights = {"model/table": values.expand(rows // 2, -1).contiguous()}
    weights |= {f"model/layers.{index}": values.expand(rows // 16, -1).contiguous() for index in range(8)}
    rest = {"checkpoint": {"global_step": 3}, "state_dict": {}}
    save({**weights, "lightning": rest}, open_folder(folder), rank=0, host="h")


@pytest.mark.parametrize("output", ["out.ckpt", "out.safetensors"])
def test_an_export_takes_little_memory_whatever_the_checkpoint_takes(tmp_path: Path, output: str) -> None:
    """The peak of a process that has exported a small one before; half of the bytes are one tensor."""
    save_net(tmp_path / "small", 1024)
    save_net(tmp_path / "large", SIZE_BYTES // 4096)
    prefix = [] if output.endswith(".ckpt") else ["--prefix", "model/"]
    first, second = tmp_path / f"first-{output}", tmp_path / output
    command = [sys.executable, "-c", EXPORT, str(tmp_path / "small"), str(first), str(second), *prefix]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert second.stat().st_size > SIZE_BYTES
    assert int(done.stdout.split("grown")[1]) < ALLOWED_BYTES, done.stdout
    if output.endswith(".ckpt"):
        table = torch.load(second, weights_only=True, mmap=True)["state_dict"]["table"]
    else:
        with safe_open(second, framework="pt") as file:
            table = file.get_tensor("table")
    assert table.shape[0] == SIZE_BYTES // 4096 // 2
    assert torch.equal(table[-1], torch.arange(1024, dtype=torch.float32))
