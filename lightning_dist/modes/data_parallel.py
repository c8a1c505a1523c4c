"""``parallel=ddp``: each rank has the whole model, and gradients are averaged."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.overrides.distributed import _sync_module_states, prepare_for_backward
from torch import nn

from lightning_dist import build
from lightning_dist.comm.feedback import Feedback
from lightning_dist.comm.hierarchical import HierarchicalAllReduce
from lightning_dist.errors import CombinationError
from lightning_dist.gradsync.data_parallel import DataParallel
from lightning_dist.gradsync.powersgd import LowRankFeedback
from lightning_dist.gradsync.sparse import SparseAverage
from lightning_dist.modes.mode import Mode


class DataParallelMode(Mode):
    """On the reducer of :class:`~torch.nn.parallel.DistributedDataParallel`."""

    _wrapped: DataParallel | None = None
    _all_reduce: HierarchicalAllReduce | None = None
    _low_rank: LowRankFeedback | None = None
    _sparse: SparseAverage | None = None
    _buffers_due = False

    def wrap(self, trainer: pl.Trainer) -> nn.Module:
        """Move it to its device, open the lanes and wrap it."""
        run = self.setting.run
        self.module.to(run.device)
        self._all_reduce = build.open_gradient_all_reduce(run, self.setting.sync)
        self._low_rank = build.low_rank_feedback_of(run, self.setting.sync)
        if self._low_rank is not None and trainer.precision == "16-mixed":
            raise CombinationError(
                "sync=powersgd with precision=16-mixed: what is owed of gradients is in units of a loss scale that "
                "changes; write precision=bf16-mixed, or sync=bf16"
            )
        self._sparse = build.open_sparse_average(
            run, self.module, self._all_reduce, sync=self.setting.sync, announce=self.setting.announce
        )
        if run.cluster.world_size > 1:
            said = build.describe(run, self._all_reduce, module=self.module, low_rank=self._low_rank)
            self.setting.announce(said)
        return self.rewrap()

    def rewrap(self) -> nn.Module:
        """Wrap it for the parameters that want gradients now."""
        assert self._all_reduce is not None
        setting = self.setting
        self._wrapped = None  # the old wrapper's autograd hooks end with it
        self._wrapped = build.wrap_data_parallel(
            self.module,
            self._all_reduce,
            self._sparse,
            run=setting.run,
            parallel=setting.parallel,
            sync=setting.sync,
            extra=setting.ddp_arguments,
            low_rank=self._low_rank,
        )
        return self._wrapped

    def place(self, trainer: pl.Trainer) -> nn.Module:
        """Move it to its device, with rank 0's values."""
        self.module.to(self.setting.run.device)
        _sync_module_states(self.module)
        return self.module

    @property
    def needs_rewrap(self) -> bool:
        """The reducer has buckets for what wanted gradients when it was made."""
        return self._wrapped is not None and not self._wrapped.is_current

    def before_backward(self, loss: torch.Tensor) -> None:
        """Prepare the reducer, which under manual optimization does not see the forward's end."""
        if self._wrapped is not None and not self.module.automatic_optimization:
            prepare_for_backward(self._wrapped, loss)

    def after_backward(self) -> None:
        """Flush the reducer after the first backward of a static graph under manual optimization."""
        if self._wrapped is None:
            return
        if not self.module.automatic_optimization:
            self._wrapped.flush_static_graph()
        self._wrapped.finish_backward()

    def no_sync(self) -> AbstractContextManager[None]:
        """The reducer's own."""
        return nullcontext() if self._wrapped is None else self._wrapped.no_sync()

    def begin_evaluation(self, num_batches: list[int | float]) -> None:
        """Bring buffers to rank 0's state once in a fit, as a wrapped forward would at each batch.

        Weight averaging swaps its values in after this, so that it waits for the first batch if all ranks surely have
        one.
        """
        agreement = self.setting.agreement
        if self._wrapped is None or agreement is None or not self._wrapped.syncs_buffers:
            return
        self._buffers_due = all(agreement.exchange(int(has_batches(num_batches))))
        if not self._buffers_due:
            self._wrapped.sync_buffers()

    def evaluate(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """The module's own; the wrapper is for gradients."""
        if self._buffers_due and self._wrapped is not None:
            self._wrapped.sync_buffers()
        self._buffers_due = False
        return super().evaluate(step, *args, **kwargs)

    @property
    def feedback(self) -> Feedback | None:
        """Of the lanes, or of what is made of gradients before."""
        return self._low_rank or (None if self._all_reduce is None else self._all_reduce.feedback)

    def abort(self, reason: str) -> None:
        """End the lanes."""
        if self._all_reduce is not None:
            self._all_reduce.abort(reason)

    def release(self, *, failed: bool) -> None:
        """Drop the wrapper."""
        self._wrapped = None

    def close(self) -> None:
        """Close lanes and groups."""
        opened = (self._all_reduce, self._sparse)
        self._all_reduce = self._sparse = None
        for part in opened:
            if part is not None:
                part.close()


def has_batches(num_batches: list[int | float]) -> bool:
    """Whether an evaluation surely has a batch."""
    return 0 < sum(num_batches) < float("inf")
