"""What training takes on a rank: a few steps of a model, and the memory of the last one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks.workload import Module, make_loader
from examples.model import Learner
from lightning_dist import HierDistStrategy
from lightning_dist.parallel.blocks import find_blocks
from lightning_dist.parallel.inventory import InventoryEntry, inventory_of
from lightning_dist.planning.activation_cost import Activations, GPTShape, gpt_activations
from lightning_dist.run_config import AdamWConfig, GPTConfig
from tests.distributed.lightning_runs import loader_of, trainer_on_pool
from tests.support.tasks import RankContext

STEPS = 3  # in the last one optimizer state exists, and DDP has built its buckets anew
GPT = GPTConfig(block_size=128, n_layer=6, n_head=6, n_embd=384)
GPT_BATCH, MLP_BATCH = 8, 4

MODES: dict[str, dict[str, Any]] = {
    "ddp": {"mode": "ddp"},
    "zero1": {"mode": "zero1"},
    "zero2": {"mode": "zero2"},
    "zero3": {"mode": "zero3"},
    "zero3_secondary": {"mode": "zero3", "secondary_shard": "host"},
    "hsdp": {"mode": "hsdp"},
}


class AdamModule(Module):
    """The MLP of the other benchmarks, by AdamW."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


@dataclass(frozen=True)
class Subject:
    """A model to train.

    Attributes:
        make: Makes the module.
        make_loader: Makes a loader of so many batches.
        activations: What one micro-batch keeps, by precision.
    """

    make: Callable[[], pl.LightningModule]
    make_loader: Callable[[int], DataLoader[Any]]
    activations: Callable[[str], Activations]

    def inventory(self) -> tuple[InventoryEntry, ...]:
        """Its parameters, without allocating them."""
        with torch.device("meta"):
            module = self.make()
        return inventory_of(module, blocks=[block.name for block in find_blocks(module)])


def _make_gpt() -> pl.LightningModule:
    return Learner(GPT, AdamWConfig(warmup_steps=0), max_steps=STEPS)


def _gpt_loader(count: int) -> DataLoader[Any]:
    tokens = torch.randint(GPT.vocab_size, (GPT_BATCH, GPT.block_size + 1), generator=torch.Generator().manual_seed(0))
    return loader_of([(tokens[:, :-1], tokens[:, 1:])] * count)


def _gpt_kept(precision: str) -> Activations:
    shape = GPTShape(
        batch=GPT_BATCH, sequence=GPT.block_size, width=GPT.n_embd, heads=GPT.n_head, vocabulary=GPT.vocab_size
    )
    return gpt_activations(shape, precision=precision)


SUBJECTS: dict[str, Subject] = {
    # a batch of 4 rows keeps 60 KB a block
    "mlp": Subject(AdamModule, lambda count: make_loader(MLP_BATCH, count), lambda _: Activations()),
    "gpt": Subject(_make_gpt, _gpt_loader, _gpt_kept),
}


@dataclass(frozen=True)
class Measured:
    """Bytes on one rank.

    Attributes:
        parameters: Distinct storages, after a step.
        gradients: Likewise.
        optimizer: Likewise.
        peak: Largest resident set of a step, less what the process takes besides the three.
        process: What it takes besides them.
    """

    parameters: int
    gradients: int
    optimizer: int
    peak: int
    process: int

    @property
    def rest(self) -> int:
        """After a step."""
        return self.parameters + self.gradients + self.optimizer


class _MemoryWatch(pl.Callback):
    """Measures the last step: resident set before it, largest in it, storages after it.

    Args:
        micro_batches: Of a step.
    """

    def __init__(self, micro_batches: int) -> None:
        self._first = (STEPS - 1) * micro_batches
        self._last = STEPS * micro_batches - 1
        self._process = 0
        self.measured: Measured | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._first:
            self._process = status_bytes("VmRSS") - sum(_storage_bytes(trainer, module))
            restart_peak()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self._last:
            peak = status_bytes("VmHWM") - self._process
            self.measured = Measured(*_storage_bytes(trainer, module), peak, self._process)


def restart_peak() -> None:
    """``VmHWM`` starts anew; see proc(5)."""
    Path("/proc/self/clear_refs").write_text("5")


def free_at_once() -> None:
    """What is freed leaves the resident set: the C library maps each larger piece by itself."""
    m_mmap_threshold = -3  # malloc.h
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 16)


def status_bytes(name: str) -> int:
    """A size in ``/proc/self/status``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {name}")


def _storage_bytes(trainer: pl.Trainer, module: pl.LightningModule) -> tuple[int, int, int]:
    """Of parameters, gradients and optimizer state."""
    parameters = list(module.parameters())
    states = [v for optimizer in trainer.optimizers for state in optimizer.state.values() for v in state.values()]
    return (
        _distinct_bytes(parameters),
        _distinct_bytes(p.grad for p in parameters if p.grad is not None),
        _distinct_bytes(value for value in states if isinstance(value, torch.Tensor)),
    )


def _distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of DTensors, what this rank holds."""
    storages = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(context: RankContext, mode: str, model: str, precision: str, micro_batches: int) -> Measured:
    """Train a few steps on this rank.

    Args:
        context: The rank.
        mode: One of :data:`MODES`.
        model: One of :data:`SUBJECTS`.
        precision: Lightning's name.
        micro_batches: Of one step.
    """
    torch.set_num_threads(1)
    free_at_once()
    subject, watch = SUBJECTS[model], _MemoryWatch(micro_batches)
    trainer = trainer_on_pool(
        context,
        HierDistStrategy(parallel=MODES[mode], sync={"timeout_s": 300.0}),
        max_steps=STEPS,
        precision=precision,
        accumulate_grad_batches=micro_batches,
        callbacks=[watch],
    )
    trainer.fit(subject.make(), subject.make_loader(STEPS * micro_batches))
    assert watch.measured is not None
    return watch.measured
