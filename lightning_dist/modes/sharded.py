"""``parallel=zero1|zero2|zero3|hsdp``: parameters, gradients or optimizer state are spread over ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_dist import build
from lightning_dist.comm.feedback import Feedback
from lightning_dist.modes.clipping import clip_as_before, clip_globally
from lightning_dist.modes.data_parallel import has_batches
from lightning_dist.modes.mode import Seat, Setting, unwrapped
from lightning_dist.modes.refusals import refuse_after_failure, refuse_scaled_products
from lightning_dist.modes.served import deal_tables
from lightning_dist.modes.serving import ServingMode
from lightning_dist.modes.whole_numbers import hooks_as_before, hooks_see_whole_numbers
from lightning_dist.parallel.held_state import HeldState
from lightning_dist.parallel.materialize import is_on_meta
from lightning_dist.parallel.norms import GlobalNorm
from lightning_dist.parallel.shard_links import ShardLinks
from lightning_dist.parallel.sharded import Sharded
from lightning_dist.parallel.tensor import TensorLinks, TensorParallel
from lightning_dist.parallel.used_shards import explaining_shards


class ShardedMode(ServingMode):
    """On FSDP2, over our lanes. The averaged copies that Lightning's callbacks keep are spread with the model.

    Args:
        setting: What it works in.
        module: The user's.
        split: What has split the module's layers before, if anything has.
        tensor: The groups of the split layers.
    """

    def __init__(
        self,
        setting: Setting,
        module: pl.LightningModule,
        split: TensorParallel | None = None,
        tensor: TensorLinks | None = None,
    ) -> None:
        super().__init__(setting, module)
        self._split = split
        self._tensor = tensor
        self._model: Sharded | None = None
        self._averages: list[Sharded] = []
        self._links: ShardLinks | None = None
        self._row_links: build.RowLinks | None = None
        self._norm: GlobalNorm | None = None
        self._buffers_due = False
        self._is_fitting = False
        self._redirection = _DDPForwardRedirection()

    def wrap(self, trainer: pl.Trainer) -> nn.Module:
        """Shard it, unless it has been all along."""
        self._is_fitting = True
        return self._shard(trainer)

    def place(self, trainer: pl.Trainer) -> nn.Module:
        """Without gradients the model stays as it is, unless it was never whole."""
        self._is_fitting = False
        if self._model is not None or is_on_meta(self.module):
            return self._shard(trainer)
        self.module.to(self.setting.run.device)
        _sync_module_states(self.module)
        return self.module

    def _shard(self, trainer: pl.Trainer) -> nn.Module:
        if self._model is not None:
            return self._model
        setting = self.setting
        if setting.ddp_arguments:
            names, mode = ", ".join(setting.ddp_arguments), setting.parallel.mode
            rank_zero_warn(f"{names}: no effect with parallel.mode={mode}; they are DistributedDataParallel's")
        self._open_tables(trainer)
        self._links = self._open_links()
        refuse_scaled_products(trainer, self._links.feedback)
        self._model = self._sharded(self.module, self._links)
        self._averages = [self._sharded(average, self._links) for average in _averages_of(trainer)]
        self._norm_globally(self._links)
        setting.announce(self._described(self._model, self._links))
        return self._model

    def _open_tables(self, trainer: pl.Trainer) -> None:
        """What has sparse gradients is not sharded."""
        setting, module = self.setting, self.module
        self._tables = deal_tables(setting, module, trainer) if self._is_fitting else None
        service = None if self._tables is None else self._tables.service
        self._row_links = build.open_row_links(
            setting.run, module, sync=setting.sync, announce=rank_zero_info, service=service
        )

    def _open_links(self) -> ShardLinks:
        """What shards travel over."""
        setting = self.setting
        return build.open_shard_links(setting.run, setting.parallel, setting.sync, self._tensor)

    def _sharded(self, module: nn.Module, links: ShardLinks) -> Sharded:
        return build.shard_model(
            module,
            links,
            run=self.setting.run,
            parallel=self.setting.parallel,
            by_child=not getattr(module, "automatic_optimization", True),
            split=self._split,
            tables=None if self._row_links is None else self._row_links.tables,
        )

    def _norm_globally(self, links: ShardLinks) -> None:
        """Clip by the norm of the whole gradient, and let hooks that log norms see plain numbers."""
        tensor, plugin = None if self._tensor is None else self._tensor.tensor, self.setting.precision
        dealt = {} if self._tables is None else self._tables.by_parameter
        owners = None if self._tables is None else self._tables.service.group
        self._norm = GlobalNorm(
            self.setting.run.collectives, links.shards, tensor, dealt=dealt.__contains__, owners=owners
        )
        clip_globally(plugin, self._norm)
        hooks_see_whole_numbers(plugin)

    def explaining(self) -> AbstractContextManager[None]:
        """Shards are no plain tensors."""
        return nullcontext() if self._model is None else explaining_shards()

    def gradient_norm(self, norm_type: float) -> torch.Tensor:
        """One sum over all ranks."""
        if self._norm is None:
            return super().gradient_norm(norm_type)
        return self._norm.total(self.module.parameters(), norm_type)

    def _described(self, model: Sharded, links: ShardLinks) -> str:
        run, lines = self.setting.run, []
        if self._split is not None and self._tensor is not None:
            lines.append(build.describe_split(run, self._split, self._tensor))
        num_data = run.cluster.world_size if self._tensor is None else self._tensor.data.size
        return "\n".join(
            [*lines, build.describe_shards(run, model, links, parallel=self.setting.parallel, num_data=num_data)]
        )

    def check_optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Refuse those made before the sharding."""
        if self._model is not None:
            self._model.check_optimizers(optimizers)
        if self._tables is not None:
            self._tables.watch(optimizers)

    def before_backward(self, loss: torch.Tensor) -> None:
        """Its end is the end of the backward of this loss."""
        if self._model is not None:
            self._model.reduction.before_backward(loss)

    def after_backward(self) -> None:
        """Sum what is not yet summed, and exchange what is not sharded."""
        if self._model is not None:
            self._model.reduction.after_backward()
        if self._tables is not None:
            self._tables.after_backward(is_last=not self._accumulates)

    def _holding_back(self) -> AbstractContextManager[None]:
        """The shards' own."""
        return nullcontext() if self._model is None else self._model.no_sync()

    def abort(self, reason: str) -> None:
        """Free who waits for this rank's rows."""
        for part in (self._row_links, self._tables):
            if part is not None:
                part.abort(reason)

    def begin_evaluation(self, num_batches: list[int | float]) -> None:
        """Gather what will be needed if ranks differ in their batches; in a fit, bring buffers to rank 0's state once.

        Weight averaging swaps its values in after this, so that both wait for the first batch if all ranks surely have
        one.
        """
        self._publish()
        model, agreement = self._model, self.setting.agreement
        if model is None:
            return
        later = False
        if self._is_fitting and agreement is not None:
            later = all(agreement.exchange(int(has_batches(num_batches))))
            self._buffers_due = later and model.syncs_buffers
            if not later:
                model.sync_buffers()
        known = float("inf") not in num_batches
        said = agreement.exchange(hash(tuple(num_batches)) if known else -1) if agreement is not None else [0]
        model.begin_evaluation(alike=len(set(said)) == 1 and (known or agreement is None), later=later)

    def evaluate(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """Through the wrapper, whose forward gathers."""
        if self._model is None:
            return super().evaluate(step, *args, **kwargs)
        if self._buffers_due:
            self._model.sync_buffers()
        self._buffers_due = False
        return self._redirection(self._model, self.module, step, *args, **kwargs)

    def end_evaluation(self) -> None:
        """Let go what was gathered."""
        if self._model is not None:
            self._model.end_evaluation()

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Values on rank 0 only.

        Raises:
            CollectiveError: A rank has failed; so shards cannot be gathered any more.
        """
        if self._model is None:
            return make()
        refuse_after_failure(self.setting.run.failure, "a sharded model")
        make_whole = functools.partial(self._model.state_dict_of, make, keep=self.setting.run.rank == 0)
        return make_whole() if self._tables is None else self._tables.state_dict_of(make_whole)

    def optimizer_state(self, optimizer: Any, make: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Values on rank 0 only."""
        if self._model is None:
            return make(optimizer)
        state = self._model.full.optimizer_state(unwrapped(optimizer), keep=self.setting.run.rank == 0)
        return state if self._tables is None else self._tables.optimizer_state(optimizer, state)

    def held_state(self) -> HeldState:
        """Shards, and what is whole."""
        if self._model is None or self._links is None:
            return super().held_state()
        layout, full = self._links.layout, self._model.full
        if self._tables is not None:
            return self._tables.held_state(layout, full)
        return HeldState(self.module, layout, self.setting.run.rank, full=full)

    @property
    def feedback(self) -> Feedback | None:
        """Of the lanes."""
        return None if self._links is None else self._links.feedback

    def hand_on(self, feedback: Feedback) -> bool:
        """Through the sums of parameter groups, of which layers that ranks share know no whole parameters."""
        parallel = self.setting.parallel
        if self._links is None or parallel.splits or parallel.stages or self.setting.sync.algorithm == "local_sgd":
            return False
        self._links.scatter.feedback = feedback
        return True

    @property
    def feedback_seat(self) -> Seat:
        """Any rank adds to a sum over all."""
        if self._links is None or self.setting.parallel.mode == "hsdp":
            return super().feedback_seat
        return self._links.scatter.index, len(self._links.scatter.members)

    @contextmanager
    def as_held(self) -> Iterator[None]:
        """Shards stay shards, and rows of tables that are dealt stay these."""
        with (
            nullcontext() if self._model is None else self._model.as_held(),
            nullcontext() if self._tables is None else self._tables.as_held(),
        ):
            yield

    def optimizer_states_to_load(self, optimizers: list[Any], states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each rank keeps its part."""
        if self._model is None:
            return states
        full = self._model.full
        cut = [full.cut_optimizer_state(*pair) for pair in zip(optimizers, states, strict=False)]
        return cut if self._tables is None else self._tables.optimizer_states_to_load(optimizers, cut)

    @property
    def outlives_call(self) -> bool:
        """A model that was never whole stays sharded between calls of the Trainer."""
        return self._model is not None and not self._model.was_whole

    def release(self, *, failed: bool) -> None:
        """Gather the model on each rank, unless others may be gone."""
        sharded = [wrapped for wrapped in (self._model, *self._averages) if wrapped is not None]
        self._model, self._averages = None, []
        self._norm = None
        clip_as_before(self.setting.precision)
        hooks_as_before(self.setting.precision)
        for wrapped in sharded:
            wrapped.release(whole=not failed)
        if self._tables is not None:
            self._tables.release(failed=failed)

    def close(self) -> None:
        """Close lanes and groups."""
        opened = (self._links, self._row_links, self._tables)
        self._links = self._row_links = self._tables = None
        for part in opened:
            if part is not None:
                part.close()


def _averages_of(trainer: pl.Trainer) -> Iterator[nn.Module]:
    """The copies of the module that Lightning's callbacks average into, made before it was sharded."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging) and callback._average_model is not None:
            yield callback._average_model.module
        if isinstance(callback, StochasticWeightAveraging) and callback._average_model is not None:
            yield callback._average_model
