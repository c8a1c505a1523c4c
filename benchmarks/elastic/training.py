"""What the ranks of these benchmarks run: the example's GPT on numbered samples; every step leaves a line.

    hierdist launch --ranks-per-host 2 -- python benchmarks/elastic/training.py --folder /tmp/run --steps 50

Lines go to ``FOLDER/steps/HOST-PID.jsonl``: when, in which round (numbers that grow), rank, number of ranks, steps
done, the samples' numbers and the loss. The clock is the machine's, the same in all processes. Rank 0 writes
``result.json`` at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import Dataset

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]

from model import Learner  # noqa: E402 - the folder of the examples is no package

from benchmarks.elastic.turns import Turn  # noqa: E402 - likewise
from lightning_dist import AsyncShardedCheckpoint, CheckpointConfig, HierDistStrategy, ShardedDataModule  # noqa: E402
from lightning_dist.config.elastic import ElasticConfig  # noqa: E402
from lightning_dist.run_config import AdamWConfig, GPTConfig  # noqa: E402

SEQ_LEN = 64
MODELS = {
    "small": GPTConfig(block_size=SEQ_LEN, n_layer=4, n_head=4, n_embd=128),  # a tenth of a second a step
    "tiny": GPTConfig(block_size=SEQ_LEN, n_layer=1, n_head=2, n_embd=32),
}
VOCAB_SIZE = MODELS["small"].vocab_size
NumberedBatch = tuple[Tensor, Tensor, Tensor]


class NumberedSamples(Dataset[NumberedBatch]):
    """Sequences that follow from their number, with it."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> NumberedBatch:
        start = (torch.arange(SEQ_LEN + 1) * (index % 7 + 1) + index) % VOCAB_SIZE
        return torch.tensor(index), start[:-1], start[1:]


class NumberedLearner(Learner):
    """The example's, with numbers beside the samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[1:], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().validation_step(batch[1:], batch_idx)


class StepLines(pl.Callback):
    """A line a micro-batch, written at once, so that a killed process has left all of them.

    Args:
        folder: Of the run.
        pause: After so many steps, do nothing for so many seconds, once.
        pass_s: A micro-batch takes so many seconds at least, as if a device were at work and the processor free; the
            second number counts while a step has several.
        turns: Folder and name of this run, if it takes turns with another one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        pause: tuple[int, float] | None,
        pass_s: tuple[float, float],
        turns: tuple[Path, str] | None,
    ) -> None:
        steps = folder / "steps"
        steps.mkdir(parents=True, exist_ok=True)
        name = f"{os.environ.get('HIERDIST_HOST', os.environ.get('GROUP_RANK', 'host'))}-{os.getpid()}.jsonl"
        self._file = os.open(steps / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._round = self._step = 0
        self._pause, self._pass_s, self._began_s = pause, pass_s, 0.0
        self._turns = turns
        self._turn: Turn | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # torchrun does not number its rounds: when rank 0 began is as good, and the same on all ranks.
        given = os.environ.get("HIERDIST_ROUND")
        self._turn = None if self._turns is None else Turn(*self._turns, trainer.global_rank)
        self._round = int(given) if given else trainer.strategy.broadcast(int(time.monotonic() * 1000))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step = trainer.global_step + 1  # all micro-batches of a step are its
        if self._turn is not None:
            self._turn.before_step(self._step)
        self._began_s = time.monotonic()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        line = {
            "at_s": time.monotonic(),
            "round": self._round,
            "rank": trainer.global_rank,
            "world": trainer.world_size,
            "step": self._step,
            "samples": batch[0].tolist(),
            "loss": outputs["loss"].item() * trainer.accumulate_grad_batches,  # it has been divided by that
        }
        os.write(self._file, json.dumps(line).encode() + b"\n")
        if self._pause is not None and self._pause[0] == trainer.global_step:
            seconds, self._pause = self._pause[1], None
            time.sleep(seconds)
        pass_s = self._pass_s[trainer.accumulate_grad_batches > 1]
        time.sleep(max(0.0, self._began_s + pass_s - time.monotonic()))
        if self._turn is not None:
            self._turn.after_step(self._step)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def weights_digest(trainer: pl.Trainer) -> str:
    """Of the bytes of all parameters; a collective call where they are sharded."""
    state = trainer.strategy.lightning_module_state_dict()
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def make_trainer(arguments: argparse.Namespace, folder: Path) -> pl.Trainer:
    """As the example makes it, with what the arguments say."""
    replica = arguments.replica
    strategy = HierDistStrategy(
        parallel=arguments.parallel,
        checkpoint=CheckpointConfig(
            mode="async_sharded",
            replica=replica,
            memory_every_n_steps=None if replica == "off" else arguments.memory_every,
        ),
        elastic=None if arguments.elastic is None else ElasticConfig(**json.loads(arguments.elastic)),
    )
    lines = StepLines(folder, pause=arguments.pause, pass_s=arguments.pass_s, turns=arguments.turns)
    callbacks: list[pl.Callback] = [lines]
    if arguments.storage_every:
        callbacks.append(
            AsyncShardedCheckpoint(
                folder / "checkpoints",
                every_n_train_steps=arguments.storage_every,
                save_last=True,
                save_top_k=-1 if arguments.storage_keeps_all else 1,
            )
        )
    validate_every = arguments.validate_every
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        max_steps=arguments.steps,
        max_epochs=-1,
        callbacks=callbacks,
        default_root_dir=folder,
        enable_checkpointing=bool(arguments.storage_every),
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        num_sanity_val_steps=0,
        val_check_interval=validate_every or None,
        check_val_every_n_epoch=None if validate_every else 1,
        limit_val_batches=2 if validate_every else 0,
    )


def _pause(text: str) -> tuple[int, float]:
    step, seconds = text.split(":")
    return int(step), float(seconds)


def _turns(text: str) -> tuple[Path, str]:
    folder, _, name = text.rpartition(":")
    return Path(folder), name


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the run; all hosts share it")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--samples", type=int, default=1 << 16, help="of an epoch")
    parser.add_argument("--batch-size", type=int, default=8, help="samples a rank and micro-batch")
    parser.add_argument("--model", default="small", choices=list(MODELS))
    parser.add_argument("--pass-s", type=float, nargs=2, default=(0.0, 0.0), help="see StepLines")
    parser.add_argument("--parallel", default="ddp")
    parser.add_argument("--replica", default="off", choices=["off", "memory", "buddy"])
    parser.add_argument("--memory-every", type=int, default=5, help="steps between two snapshots in memory")
    parser.add_argument("--storage-every", type=int, default=50, help="steps between two checkpoints; 0: none")
    parser.add_argument("--storage-keeps-all", action="store_true", help="of them; else the newest")
    parser.add_argument("--validate-every", type=int, default=0, help="steps; 0: never")
    parser.add_argument("--pause", type=_pause, help="STEP:SECONDS")
    parser.add_argument("--turns", type=_turns, help="FOLDER:NAME")
    parser.add_argument("--elastic", help="options of elastic, as JSON")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    pl.seed_everything(7, workers=True, verbose=False)
    torch.set_num_threads(1)
    trainer = make_trainer(arguments, folder)
    learner = NumberedLearner(MODELS[arguments.model], AdamWConfig(warmup_steps=5), max_steps=arguments.steps)
    data = ShardedDataModule(
        NumberedSamples(arguments.samples),
        val=NumberedSamples(64) if arguments.validate_every else None,
        config={"batch_size": arguments.batch_size, "seed": 7},
    )
    # Under `hierdist launch` the library knows where to go on; torchrun leaves it to the script.
    newest = folder / "checkpoints" / "last.ckpt"
    trainer.fit(learner, data, ckpt_path="last" if newest.exists() else None)
    digest = weights_digest(trainer)
    if trainer.is_global_zero:
        result = {"steps": trainer.global_step, "weights": digest, "ranks": trainer.world_size}
        (folder / "result.json").write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
