"""``parallel=zero1|zero2`` with ``parallel.pipeline.size``: ranks that hold the same stages share what is in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from lightning_dist import build
from lightning_dist.modes.mode import unwrapped
from lightning_dist.modes.pipeline import PipelineMode
from lightning_dist.modes.refusals import refuse_after_failure
from lightning_dist.modes.whole_numbers import hooks_as_before, hooks_see_whole_numbers
from lightning_dist.parallel.held_state import HeldState
from lightning_dist.parallel.norms import GlobalNorm
from lightning_dist.parallel.pipeline import StagedModel, StageLinks
from lightning_dist.parallel.pipeline.shards import ShardedStages
from lightning_dist.parallel.pipeline.stage import LayerStage
from lightning_dist.parallel.shard_links import ShardLinks
from lightning_dist.parallel.used_shards import explaining_shards


class ShardedPipelineMode(PipelineMode):
    """A pipeline; the ranks that hold the same stages shard their gradients and optimizer state."""

    _shard_links: ShardLinks | None = None
    _shards: ShardedStages | None = None

    def _connect(self, staged: StagedModel, links: StageLinks) -> GlobalNorm:
        """Shard the stages."""
        run = self.setting.run
        shard_links = self._shard_links = build.open_stage_shard_links(run, links)
        self._shards = build.shard_stages(staged, shard_links, run=run, parallel=self.setting.parallel)
        hooks_see_whole_numbers(self.setting.precision)
        return GlobalNorm(run.collectives, shard_links.shards, stages=links.pipeline, counts=staged.counts)

    def explaining(self) -> AbstractContextManager[None]:
        """Shards are no plain tensors."""
        return nullcontext() if self._shards is None else explaining_shards()

    def check_optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Refuse those that look at all parameters at once, or at what was there before the sharding."""
        super().check_optimizers(optimizers)
        if self._shards is not None:
            self._shards.check_optimizers(optimizers)

    # -- training ------------------------------------------------------------------------------------------------------

    def training_step(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of a batch through the stages, whose parameters are gathered for it."""
        assert self._shards is not None
        with self._shards.gathered():
            return super().training_step(call, *args, **kwargs)

    def _on_last_gradient(self, stage: LayerStage) -> None:
        assert self._shards is not None
        self._shards.on_last_gradient(stage)

    def _synchronise(self) -> None:
        assert self._shards is not None
        assert self._staged is not None
        self._shards.finish()
        if self._synchronises:  # zero2 sums shards after each batch, and the shards of tied weights once
            self._staged.shared.sum_gradients()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A window of accumulation goes on."""
        with super().no_sync(), nullcontext() if self._shards is None else self._shards.no_sync():
            yield

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def begin_evaluation(self, num_batches: list[int | float]) -> None:
        """Gather what will be needed if ranks differ in their batches."""
        super().begin_evaluation(num_batches)
        agreement = self.setting.agreement
        if self._shards is None or agreement is None:
            return
        known = float("inf") not in num_batches
        said = agreement.exchange(hash(tuple(num_batches)) if known else -1)
        self._shards.begin_evaluation(alike=len(set(said)) == 1 and known)

    def evaluate(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """Forward of a batch through the stages."""
        with nullcontext() if self._shards is None else self._shards.gathered():
            return super().evaluate(step, *args, **kwargs)

    def end_evaluation(self) -> None:
        """Let go what was gathered."""
        if self._shards is not None:
            self._shards.end_evaluation()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Values on rank 0 only.

        Raises:
            CollectiveError: A rank has failed; so shards cannot be gathered any more.
        """
        if self._shards is None:
            return super().state_dict(make)
        refuse_after_failure(self.setting.run.failure, "sharded stages")
        return self._shards.state_dict_of(make, keeps=self.setting.run.rank == 0, gathers_for=self._has_rank_0)

    def optimizer_state(self, optimizer: Any, make: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Values on rank 0 only."""
        if self._shards is None:
            return super().optimizer_state(optimizer, make)
        return self._shards.optimizer_state(
            unwrapped(optimizer), keeps=self.setting.run.rank == 0, gathers_for=self._has_rank_0
        )

    def held_state(self) -> HeldState:
        """Shards of this rank's stages."""
        return super().held_state() if self._shards is None else self._held_state_of(self._shards.full)

    def as_held(self) -> AbstractContextManager[None]:
        """Shards stay shards."""
        return super().as_held() if self._shards is None else self._shards.as_held()

    def optimizer_states_to_load(self, optimizers: list[Any], states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each rank keeps its shards of the entries of its stages' parameters."""
        own = super().optimizer_states_to_load(optimizers, states)
        if self._shards is None:
            return own
        return [self._shards.cut_optimizer_state(*pair) for pair in zip(optimizers, own, strict=False)]

    @property
    def _has_rank_0(self) -> bool:
        """Whether rank 0 is in this pipeline, so that it gets the values from here."""
        return self._links is not None and 0 in self._links.pipeline.ranks

    # -- ending --------------------------------------------------------------------------------------------------------

    def release(self, *, failed: bool) -> None:
        """Make the stages whole, then the module."""
        hooks_as_before(self.setting.precision)
        shards, self._shards = self._shards, None
        if shards is not None:
            shards.release(whole=not failed)
        super().release(failed=failed)

    def close(self) -> None:
        """End lanes and groups."""
        links, self._shard_links = self._shard_links, None
        if links is not None:
            links.close()
        super().close()
