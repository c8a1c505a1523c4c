"""``parallel=ddp``: each rank has the whole model, and gradients are averaged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.overrides.distributed import _sync_module_states, prepare_for_backward
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_dist import build
from lightning_dist.comm.collectives import RankGroup
from lightning_dist.comm.feedback import Feedback
from lightning_dist.comm.hierarchical import HierarchicalAllReduce
from lightning_dist.gradsync.data_parallel import DataParallel, has_parameters_for_reducer, keep_from_reducer
from lightning_dist.gradsync.powersgd import LowRankFeedback
from lightning_dist.gradsync.sparse import SparseAverage, has_sparse_gradients
from lightning_dist.modes.clipping import clip_as_before, clip_globally
from lightning_dist.modes.refusals import refuse_scaled_products
from lightning_dist.modes.served import deal_tables
from lightning_dist.modes.serving import ServingMode
from lightning_dist.parallel.held_state import HeldState
from lightning_dist.parallel.norms import GlobalNorm
from lightning_dist.topology.layout import Axes, Layout


class DataParallelMode(ServingMode):
    """On the reducer of :class:`~torch.nn.parallel.DistributedDataParallel`."""

    _wrapped: DataParallel | None = None
    _all_reduce: HierarchicalAllReduce | None = None
    _low_rank: LowRankFeedback | None = None
    _sparse: SparseAverage | None = None
    _norm: GlobalNorm | None = None
    _buffers_due = False

    def wrap(self, trainer: pl.Trainer) -> nn.Module:
        """Move it to its device, open the lanes and wrap it."""
        run = self.setting.run
        self.module.to(run.device)
        self._all_reduce = self._open_all_reduce()
        self._low_rank = build.low_rank_feedback_of(run, self.setting.sync)
        refuse_scaled_products(trainer, self._low_rank)
        self._tables = deal_tables(self.setting, self.module, trainer)
        if self._tables is not None:
            dealt = self._tables.by_parameter
            keep_from_reducer(self.module, [name for name, value in self.module.named_parameters() if value in dealt])
        self._sparse = build.open_sparse_average(
            run,
            self.module,
            self._all_reduce,
            sync=self.setting.sync,
            announce=rank_zero_info,
            tables=None if self._tables is None else self._tables.service,
        )
        self._clip_rows()
        if run.cluster.world_size > 1:
            said = build.describe(run, self._all_reduce, module=self.module, low_rank=self._low_rank)
            self.setting.announce(said)
        return self.rewrap()

    def _open_all_reduce(self) -> HierarchicalAllReduce:
        """Lanes for gradients."""
        return build.open_gradient_all_reduce(self.setting.run, self.setting.sync)

    def _clip_rows(self) -> None:
        """Where gradients are sparse, of which torch has no norm, or their rows are on several ranks."""
        tables = self._tables
        if has_sparse_gradients(self.module):
            self._norm = GlobalNorm(
                self.setting.run.collectives,
                dealt=lambda parameter: tables is not None and parameter in tables.by_parameter,
                owners=None if tables is None else tables.service.group,
            )
            clip_globally(self.setting.precision, self._norm)

    def check_optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Once an optimizer has made its step, other ranks may look at what it has made of this rank's rows."""
        if self._tables is not None:
            self._tables.watch(optimizers)

    def gradient_norm(self, norm_type: float) -> torch.Tensor:
        """Over the rows of all ranks."""
        if self._norm is None:
            return super().gradient_norm(norm_type)
        return self._norm.total(self.module.parameters(), norm_type)

    def rewrap(self) -> nn.Module:
        """Wrap it for the parameters that want gradients now."""
        assert self._all_reduce is not None
        setting = self.setting
        if self._tables is not None and not has_parameters_for_reducer(self.module):
            return self.module  # torch refuses to wrap what has no gradients to reduce
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
            inside=self._reducing,
        )
        return self._wrapped

    @property
    def _reducing(self) -> RankGroup | None:
        """The ranks that train together; ``None``: all."""
        return None

    def place(self, trainer: pl.Trainer) -> nn.Module:
        """Move it to its device, with rank 0's values."""
        self.module.to(self.setting.run.device)
        _sync_module_states(self.module)
        return self.module

    @property
    def needs_rewrap(self) -> bool:
        """The reducer has buckets for what wanted gradients when it was made."""
        if self._wrapped is None:
            return self._tables is not None and has_parameters_for_reducer(self.module)
        return not self._wrapped.is_current

    def before_backward(self, loss: torch.Tensor) -> None:
        """Prepare the reducer, which under manual optimization does not see the forward's end."""
        if self._wrapped is not None and not self.module.automatic_optimization:
            prepare_for_backward(self._wrapped, loss)

    def after_backward(self) -> None:
        """Exchange what the reducer does not know of; and flush it after the first backward of a static graph under
        manual optimization.
        """
        if self._tables is not None:
            self._tables.after_backward(is_last=not self._accumulates)
        if self._wrapped is None:
            return
        if not self.module.automatic_optimization:
            self._wrapped.flush_static_graph()
        self._wrapped.finish_backward()

    def _holding_back(self) -> AbstractContextManager[None]:
        """The reducer's own."""
        return nullcontext() if self._wrapped is None else self._wrapped.no_sync()

    def begin_evaluation(self, num_batches: list[int | float]) -> None:
        """Bring buffers to rank 0's state once in a fit, as a wrapped forward would at each batch.

        Weight averaging swaps its values in after this, so that it waits for the first batch if all ranks surely have
        one.
        """
        self._publish()
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

    def hand_on(self, feedback: Feedback) -> bool:
        """Through the buckets of the reducer."""
        if self._all_reduce is None or self.setting.sync.algorithm == "local_sgd":
            return False
        self._all_reduce.feedback = feedback
        return True

    def abort(self, reason: str) -> None:
        """End the lanes."""
        if self._all_reduce is not None:
            self._all_reduce.abort(reason)
        if self._tables is not None:
            self._tables.abort(reason)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Values of tables that are dealt on rank 0 only."""
        return make() if self._tables is None else self._tables.state_dict_of(make)

    def optimizer_state(self, optimizer: Any, make: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """The same of what optimizers keep beside them."""
        state = make(optimizer)
        return state if self._tables is None else self._tables.optimizer_state(optimizer, state)

    def optimizer_states_to_load(self, optimizers: list[Any], states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each rank keeps what belongs to its rows."""
        return states if self._tables is None else self._tables.optimizer_states_to_load(optimizers, states)

    def as_held(self) -> AbstractContextManager[None]:
        """Of tables that are dealt, this rank's rows."""
        return nullcontext() if self._tables is None else self._tables.as_held()

    def held_state(self) -> HeldState:
        """Rows of tables that are dealt, and all else whole."""
        if self._tables is None:
            return super().held_state()
        cluster = self.setting.run.cluster
        return self._tables.held_state(Layout.in_rank_order(cluster, Axes(dp_replicate=cluster.world_size)))

    # -- ending -------------------------------------------------------------------------------------------------------

    def release(self, *, failed: bool) -> None:
        """Drop the wrapper; gather tables on each rank, unless others may be gone."""
        self._wrapped = self._norm = None
        clip_as_before(self.setting.precision)
        if self._tables is not None:
            self._tables.release(failed=failed)
            keep_from_reducer(self.module, ())

    def close(self) -> None:
        """Close lanes and groups."""
        opened = (self._all_reduce, self._sparse, self._tables)
        self._all_reduce = self._sparse = self._tables = None
        for part in opened:
            if part is not None:
                part.close()


def has_batches(num_batches: list[int | float]) -> bool:
    """Whether an evaluation surely has a batch."""
    return 0 < sum(num_batches) < float("inf")
