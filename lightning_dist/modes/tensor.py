"""``parallel=tensor``, and ``parallel.tensor.size`` inside shards: ranks of a host share each layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn

from lightning_dist import build
from lightning_dist.comm.feedback import Feedback
from lightning_dist.errors import CombinationError
from lightning_dist.modes.averaged import AveragedMode
from lightning_dist.modes.mode import Mode, Seat, Setting
from lightning_dist.modes.refusals import refuse_wholes
from lightning_dist.modes.sharded import ShardedMode
from lightning_dist.parallel.batches import check_batches, fingerprint, who_differs
from lightning_dist.parallel.held_state import HeldState
from lightning_dist.parallel.tensor import TensorLinks, TensorParallel, refuse_unsplit, refuse_whole_only
from lightning_dist.parallel.tensor.wrapped import SplitModule


class TensorMode(Mode):
    """Splits the layers; what happens between ranks that read different data is another mode's, inside this one."""

    def __init__(self, setting: Setting, module: pl.LightningModule) -> None:
        super().__init__(setting, module)
        self._links: TensorLinks | None = None
        self._split: TensorParallel | None = None
        self._inner: Mode | None = None
        self._wrapped: SplitModule | None = None
        self._checks_evaluation = False

    def wrap(self, trainer: pl.Trainer) -> nn.Module:
        """Split the layers, then shard, or get ready to average."""
        self._refuse(trainer)
        setting = self.setting
        split, links = self._open()
        if setting.parallel.shards:
            self._inner = ShardedMode(setting, self.module, split, links)
        else:
            self._inner = AveragedMode(setting, self.module, split, links)
            setting.announce(build.describe_split(setting.run, split, links))
        wrapped = self._inner.wrap(trainer)
        self._wrapped = SplitModule(wrapped, split, self._check_epoch)
        return self._wrapped

    def place(self, trainer: pl.Trainer) -> nn.Module:
        """Split the layers."""
        split, links = self._open()
        self._inner = AveragedMode(self.setting, self.module, split, links)
        return self._inner.place(trainer)

    def _open(self) -> tuple[TensorParallel, TensorLinks]:
        setting = self.setting
        links = self._links = build.open_tensor_links(setting.run, setting.parallel, setting.sync)
        split = self._split = build.split_module(self.module, links, run=setting.run, parallel=setting.parallel)
        return split, links

    def _check_batch(self, batch: Any) -> None:
        assert self._links is not None
        check_batches(
            batch, self.setting.run.collectives, self._links.tensor, self.setting.run.device, doing="share each layer"
        )

    def _check_epoch(self, batch: Any) -> None:
        """The first batch that is trained on in an epoch, and the random numbers that its dropout will draw."""
        assert self._links is not None
        assert self._split is not None
        self._check_batch(batch)
        run, group = self.setting.run, self._links.tensor
        states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if run.device.type == "cuda" else [])]
        different = who_differs(fingerprint(states), run.collectives, group, run.device)
        if different is None:
            return
        with self._links.operation("sharing of the random state"):
            self._split.share_random_state()
        if group.index == 0:
            warnings.warn(
                f"rank {group.ranks[0]} and rank {different} share each layer, so they must draw the same random "
                "numbers, but their default generators differed; all have that of the first now. Seed them alike "
                "(seed_everything without the rank), and draw numbers on all ranks or from a generator of your own",
                stacklevel=2,
            )

    def _refuse(self, trainer: pl.Trainer) -> None:
        """What is not right with split layers, whatever the plan.

        Raises:
            CombinationError: The run has some of it.
        """
        mode = self.setting.parallel.mode
        refuse_wholes(
            trainer,
            self.module,
            self.setting.precision,
            averages="whole parameters, and those of split layers are parts: write parallel=ddp, zero1, zero2 or zero3 "
            "without parallel.tensor.size",
            scaler="torch's GradScaler does not take split layers beside whole ones; write precision=bf16-mixed, or "
            "parallel=zero3 without parallel.tensor.size",
            batch_norm=" counts the samples of ranks that share layers more than once: write sync_batchnorm=False, or "
            "parallel.tensor.size=1",
        )
        if self.setting.parallel.shards and not self.module.automatic_optimization:
            raise CombinationError(
                f"manual optimization with parallel.mode={mode} and split layers: write parallel=tensor, or "
                f"parallel={mode} without parallel.tensor.size"
            )

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same parts."""
        return None if self._links is None else self._links.data.process_group

    def check_optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Refuse those made before the split, and those the inner mode refuses."""
        assert self._split is not None
        assert self._inner is not None
        refuse_unsplit(optimizers, self._split)
        for optimizer in optimizers:
            refuse_whole_only(optimizer)
        self._inner.check_optimizers(optimizers)

    def explaining(self) -> AbstractContextManager[None]:
        """The inner mode's."""
        return nullcontext() if self._inner is None else self._inner.explaining()

    def gradient_norm(self, norm_type: float) -> torch.Tensor:
        """The inner mode's."""
        return super().gradient_norm(norm_type) if self._inner is None else self._inner.gradient_norm(norm_type)

    def begin_batch(self, batch_idx: int) -> None:
        """The first of an epoch is looked at."""
        if batch_idx == 0 and self._wrapped is not None:
            self._wrapped.check_next()
        if self._inner is not None:
            self._inner.begin_batch(batch_idx)

    def before_backward(self, loss: torch.Tensor) -> None:
        """The inner mode's."""
        if self._inner is not None:
            self._inner.before_backward(loss)

    def running_backward(self) -> AbstractContextManager[None]:
        """Split logits stay split, and what is recomputed draws each rank's own numbers."""
        return nullcontext() if self._split is None else self._split.running()

    def after_backward(self) -> None:
        """The inner mode's."""
        if self._inner is not None:
            self._inner.after_backward()

    def no_sync(self) -> AbstractContextManager[None]:
        """The inner mode's."""
        return nullcontext() if self._inner is None else self._inner.no_sync()

    def begin_evaluation(self, num_batches: list[int | float]) -> None:
        """The inner mode's; the first batch is looked at."""
        self._checks_evaluation = True
        if self._inner is not None:
            self._inner.begin_evaluation(num_batches)

    def evaluate(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """The inner mode's; logits are whole."""
        assert self._split is not None
        assert self._inner is not None
        if self._checks_evaluation:
            self._checks_evaluation = False
            self._check_batch((args, kwargs))
        with self._split.running(keeps_logits=False):
            return self._inner.evaluate(step, *args, **kwargs)

    def end_evaluation(self) -> None:
        """The inner mode's."""
        if self._inner is not None:
            self._inner.end_evaluation()

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Values on rank 0 only."""
        return make() if self._inner is None else self._inner.state_dict(make)

    def optimizer_state(self, optimizer: Any, make: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Values on rank 0 only."""
        return make(optimizer) if self._inner is None else self._inner.optimizer_state(optimizer, make)

    @property
    def feedback(self) -> Feedback | None:
        """That of how gradients are averaged."""
        return None if self._inner is None else self._inner.feedback

    @property
    def feedback_seat(self) -> Seat:
        """That of how gradients are averaged."""
        return super().feedback_seat if self._inner is None else self._inner.feedback_seat

    def held_state(self) -> HeldState:
        """The inner mode's."""
        return super().held_state() if self._inner is None else self._inner.held_state()

    def as_held(self) -> AbstractContextManager[None]:
        """The inner mode's."""
        return nullcontext() if self._inner is None else self._inner.as_held()

    def optimizer_states_to_load(self, optimizers: list[Any], states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each rank keeps its part."""
        return states if self._inner is None else self._inner.optimizer_states_to_load(optimizers, states)

    def abort(self, reason: str) -> None:
        """The inner mode's."""
        if self._inner is not None:
            self._inner.abort(reason)

    def release(self, *, failed: bool) -> None:
        """Make the module whole, unless others may be gone."""
        if self._inner is not None:
            self._inner.release(failed=failed)
        self._wrapped = None
        split, self._split = self._split, None
        if split is not None and failed:
            split.abandon()
        elif split is not None:
            split.release()

    def close(self) -> None:
        """End lanes and groups, the inner mode's first."""
        for part in (self._inner, self._links):
            if part is not None:
                part.close()
        self._inner = self._links = None
