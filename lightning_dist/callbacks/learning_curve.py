"""Writes down the loss of each step, for ``hierdist ab``; added by ``hierdist_ab_hook``, not by users."""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import lightning.pytorch as pl
import torch

from lightning_dist.capture.saying import say
from lightning_dist.errors import UnmeasurableError
from lightning_dist.events import Event, EventKind, EventStream
from lightning_dist.experiment.curves import VERSION, rank_file
from lightning_dist.monitor.sampling.network import NetworkSource

_FLUSH_EVERY_S = 1.0
_CHECKED_BYTES = 1 << 16  # of each tensor of a batch


class LearningCurve(pl.Callback):
    """Writes, of each optimizer step and rank, the loss, the time and what went to other hosts.

    Nothing is asked of other ranks, and no device is waited for but once a second. The first fit of a process is
    written down, and no further one.

    Args:
        folder: Where to; one that all hosts share, or else the ranks of this host are read only.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._file: TextIO | None = None
        self._is_over = False
        self._events: EventStream | None = None
        self._spans: deque[Event] = deque()
        self._lines: list[dict[str, Any]] = []
        self._losses: list[torch.Tensor] = []  # of the micro-batches of this step
        self._crc = 0
        self._global_step = 0
        self._network: NetworkSource | None = None  # of the first rank of a host
        self._sent = 0
        self._flushed_s = self._since_s = 0.0
        self._validation_s = 0.0
        self._validation_since_s = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the file."""
        if self._is_over or self._file is not None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = rank_file(self._folder, trainer.global_rank).open("a", encoding="utf-8")
        except OSError as error:
            say(f"hierdist ab learns nothing of this rank: {error}")
            return
        events = getattr(trainer.strategy, "events", None)
        if isinstance(events, EventStream) and _num_hosts(trainer.strategy) > 1:
            self._events = events
            events.add_sink(self._spans.append)
        if trainer.local_rank == 0 and trainer.num_nodes > 1:
            with contextlib.suppress(UnmeasurableError):
                self._network = NetworkSource()
                self._sent = self._network.sent_bytes()
        self._global_step = trainer.global_step
        self._lines.append(
            {
                "kind": "start",
                "version": VERSION,
                "rank": trainer.global_rank,
                "world_size": trainer.world_size,
                "nodes": trainer.num_nodes,
            }
        )
        self._losses.clear()
        self._crc = 0
        self._since_s = self._flushed_s = time.monotonic()
        self._validation_s = 0.0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note what is read at some steps: runs of a pair are to read the same."""
        if self._file is not None and _is_checked(trainer.global_step + 1):
            self._crc = _crc_of(batch, self._crc)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the loss, and after an optimizer step the step."""
        if self._file is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):
            # Lightning has divided it by the number of micro-batches of a step.
            factor = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self._losses.append(loss.detach() * factor)
        if trainer.global_step == self._global_step:
            return  # gradients are accumulated
        self._global_step = trainer.global_step
        if self._losses:
            self._lines.append(self._step_line())
        self._losses.clear()
        self._crc = 0
        now_s = time.monotonic()
        if now_s - self._flushed_s > _FLUSH_EVERY_S:
            self._flushed_s = now_s
            self._flush()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The clock stands still."""
        self._validation_since_s = time.monotonic()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note what was logged."""
        if self._file is None or trainer.sanity_checking:
            return
        self._validation_s += time.monotonic() - self._validation_since_s
        metrics = {name: value for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        self._lines.append({"kind": "validation", "step": trainer.global_step, "metrics": metrics})

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note that the fit came to its end; the last validation has been."""
        if self._file is not None:
            self._lines.append({"kind": "end", "step": trainer.global_step})
        self._close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let the file go."""
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Let the file go: the Trainer tears nothing down."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """Nothing of it belongs into a checkpoint."""
        return {}

    def _step_line(self) -> dict[str, Any]:
        line: dict[str, Any] = {
            "kind": "step",
            "step": self._global_step,
            "seconds": round(time.monotonic() - self._since_s - self._validation_s, 6),
            "loss": torch.stack(self._losses).float().mean(),
        }
        if _is_checked(self._global_step):
            line["crc"] = self._crc
        if self._events is not None:
            line["crossed"] = sum(_crossed(event) for event in _emptied(self._spans))
        if self._network is not None:
            now = self._network.sent_bytes()
            line["sent"], self._sent = now - self._sent, now
        return line

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if self._file is None:
            return
        try:
            self._file.writelines(f"{json.dumps(line, default=float, separators=(',', ':'))}\n" for line in lines)
            self._file.flush()
        except OSError as error:
            say(f"hierdist ab learns no more of this rank: {error}")
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()

    def _close(self) -> None:
        self._flush()
        if self._events is not None:
            self._events.remove_sink(self._spans.append)
            self._events = None
        self._spans.clear()
        if self._file is not None:
            self._file.close()
            self._file = None
            self._is_over = True


def _num_hosts(strategy: Any) -> int:
    """As this package's strategies know it: ranks may be told apart as hosts on one machine."""
    context = getattr(strategy, "run_context", None)
    return 1 if context is None else int(context.cluster.num_hosts)


def _is_checked(step: int) -> bool:
    """Steps 1, 2, 4, 8, ...: a batch on a device is copied for it, and waited for."""
    return step & (step - 1) == 0


def _crossed(event: Event) -> int:
    """Payload of an operation that left the host."""
    tier = event.attributes.get("tier")
    if event.kind is not EventKind.SPAN or tier is None or tier == "host":
        return 0
    return int(event.attributes.get("size_bytes") or 0)


def _emptied(events: deque[Event]) -> Iterator[Event]:
    """Lanes may add to it meanwhile."""
    while events:
        yield events.popleft()


def _crc_of(batch: Any, crc: int) -> int:
    if isinstance(batch, torch.Tensor):
        flat = batch.detach().reshape(-1)
        some = flat[: _CHECKED_BYTES // max(flat.element_size(), 1)].cpu().contiguous()
        return zlib.crc32(some.view(torch.uint8).numpy().tobytes() if some.numel() else b"", crc)
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        for each in batch:
            crc = _crc_of(each, crc)
    return crc
