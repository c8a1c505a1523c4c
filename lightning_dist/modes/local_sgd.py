"""``sync=local_sgd``: workers make optimizer steps of their own, and average how far they have gone now and then.

Note [Which weights are where]
    While a fit trains, the module has this worker's own weights. In an evaluation, and in the model of a checkpoint,
    are the outer ones, which are the same on all ranks already: nothing is sent for it, and training goes on as if
    there had been none. At the end of training what was made since is averaged, and every rank has the outer weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.overrides.distributed import _sync_module_states
from torch import Tensor, nn

from lightning_dist import build
from lightning_dist.comm.agreement import Agreement
from lightning_dist.comm.collectives import RankGroup
from lightning_dist.comm.feedback import Feedback
from lightning_dist.comm.groups import broadcast_from_first, destroy
from lightning_dist.comm.hierarchical import HierarchicalAllReduce
from lightning_dist.errors import CombinationError
from lightning_dist.gradsync.local_sgd import LocalSGD
from lightning_dist.gradsync.sparse import has_sparse_gradients
from lightning_dist.modes.data_parallel import DataParallelMode
from lightning_dist.modes.local_state import LocalState
from lightning_dist.modes.mode import Mode, Setting
from lightning_dist.modes.sharded import ShardedMode
from lightning_dist.parallel.held_state import HeldState, local_of
from lightning_dist.parallel.shard_links import ShardLinks


class LocalMode(Mode):
    """What both modes below share: the rest of a mode is what it is without."""

    def __init__(self, setting: Setting, module: pl.LightningModule) -> None:
        super().__init__(setting, module)
        self._local: LocalSGD | None = None
        self._agreement: Agreement | None = None
        self._lanes: HierarchicalAllReduce | None = None
        self._state: LocalState | None = None
        self._at_batch_end = _AtBatchEnd(self)
        self._knows_step = self._has_parted = False
        self._trainer: pl.Trainer | None = None
        self._workers = build.workers_of(setting.run, setting.sync)

    def wrap(self, trainer: pl.Trainer) -> nn.Module:
        """As without, and open what workers meet over."""
        _refuse(trainer, self.module)
        self._leave()  # a model that was never whole stays sharded from fit to fit
        wrapped = super().wrap(trainer)
        run, setting = self.setting.run, self.setting
        self._agreement = build.open_agreement(run)
        self._lanes = build.open_outer_lanes(run, setting.parallel, setting.sync, self._workers)
        self._local = build.local_sgd_of(
            run,
            self.module,
            setting.sync,
            warmup_steps=0 if self._has_parted else setting.sync.local_sgd.warmup_steps,
            workers=self._workers,
            lanes=self._lanes,
            agreement=self._agreement,
            values_of=lambda tensor: local_of(tensor.detach()),
            start_of=self._start_of,
        )
        self._state = LocalState(self._local, self.module, self.as_shown)
        self._trainer = trainer
        trainer.callbacks.insert(0, self._at_batch_end)  # type: ignore[attr-defined]  # made in __init__
        setting.announce(build.describe_local_sgd(self._local, setting.sync))
        return wrapped

    @property
    def is_exact(self) -> bool:
        """Whether all ranks make the next step together."""
        return self._local.is_exact if self._local is not None else self.setting.sync.local_sgd.warmup_steps > 0

    def as_shown(self, name: str, values: Tensor) -> Tensor:
        """Values that this rank has of a parameter or buffer, as a ``state_dict()`` holds them."""
        return values

    def _start_of(self, parameter: nn.Parameter) -> int:
        """Where this rank's values of a parameter begin in the whole."""
        return 0

    # -- training -----------------------------------------------------------------------------------------------------

    def begin_batch(self, batch_idx: int) -> None:
        """Know what the step is to change."""
        super().begin_batch(batch_idx)
        local = self._local
        if local is None:
            return
        self._know_step()
        if not local.is_exact and not local.weights.has_begun:
            self._part()
        local.before_step()

    def _know_step(self) -> None:
        """How many steps were made before, unless a checkpoint has said so."""
        if self._local is not None and self._trainer is not None and not self._knows_step:
            self._local.step = self._trainer.fit_loop.epoch_loop._batches_that_stepped
            self._knows_step = True

    def _part(self) -> None:
        """Workers train apart from now on; buffers begin as rank 0 has them."""
        self._part_model()
        buffers = list(self.module.buffers())
        if buffers:
            with self.setting.run.operation("broadcast of buffers"):
                broadcast_from_first(buffers)

    def _part_model(self) -> None:
        """Nothing of the model's own talks to other workers from now on."""
        self._has_parted = True

    def before_backward(self, loss: torch.Tensor) -> None:
        """A step may have unfrozen something."""
        super().before_backward(loss)
        if self._local is not None:
            self._local.before_step()

    def end_batch(self, trainer: pl.Trainer) -> None:
        """If a window of accumulation is over, an optimizer step is made, also if this rank has skipped it."""
        if self._local is not None and not trainer.fit_loop.epoch_loop._should_accumulate():
            self._local.after_step()

    def end_training(self) -> None:
        """Average what was made since."""
        super().end_training()
        if self._local is not None:
            self._local.finish()
            self.forget()

    def begin_evaluation(self, num_batches: list[int | float]) -> None:
        """In a fit, of the outer weights."""
        if self._local is not None:
            self._local.weights.show()
        super().begin_evaluation(num_batches)

    def end_evaluation(self) -> None:
        """This worker's own weights again."""
        super().end_evaluation()
        if self._local is not None:
            self._local.weights.hide()

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def feedback(self) -> Feedback | None:
        """Of what workers average."""
        return None if self._lanes is None else self._lanes.feedback

    @property
    def feedback_seat(self) -> tuple[int, int]:
        """Any rank adds to a sum over all."""
        return self.setting.run.rank, self.setting.run.cluster.world_size

    @property
    def local_state(self) -> LocalState | None:
        """What checkpoints hold besides."""
        return self._state

    def held_state(self) -> HeldState:
        """The optimizers of other workers have other states, once they train apart."""
        held = super().held_state()
        if self._local is None or not self._local.weights.has_begun:
            return held
        return held.among(self._workers.own, model=False)

    def forget(self) -> None:
        """What was made apart is over, or not what training goes on from; the loop knows how many steps were made."""
        super().forget()
        self._knows_step = False
        if self._local is not None:
            self._local.forget()

    def has_taken(self) -> None:
        """A checkpoint has said how many steps were made, and what each worker has."""
        self._knows_step = True
        if not self.is_exact:
            self._part_model()

    # -- ending -------------------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """End the lanes."""
        super().abort(reason)
        if self._lanes is not None:
            self._lanes.abort(reason)

    def release(self, *, failed: bool) -> None:
        """As without."""
        self._leave()
        super().release(failed=failed)

    def close(self) -> None:
        """Close lanes and groups."""
        super().close()
        self._leave()

    def _leave(self) -> None:
        """End what a fit has opened beside the model. Safe to call twice."""
        callbacks: list[pl.Callback] = [] if self._trainer is None else self._trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [each for each in callbacks if each is not self._at_batch_end]
        self._local = self._state = self._trainer = None
        self._knows_step = False
        lanes, self._lanes = self._lanes, None
        agreement, self._agreement = self._agreement, None
        for part in (lanes, agreement):
            if part is not None:
                part.close()


class LocalDataParallelMode(LocalMode, DataParallelMode):
    """``parallel=ddp``: the ranks of a worker have a reducer of their own."""

    _world: HierarchicalAllReduce | None = None
    _inside: HierarchicalAllReduce | None = None
    _group: RankGroup | None = None
    _is_apart = False

    def _open_all_reduce(self) -> HierarchicalAllReduce:
        run, sync = self.setting.run, self.setting.sync
        if self.is_exact:
            self._world = build.open_gradient_all_reduce(run, build.exactly(sync))
        self._inside, self._group = build.open_worker_gradients(run, sync, self._workers)
        return self._world or self._inside

    def rewrap(self) -> nn.Module:
        """For the parameters that want gradients now, and among those that train together now."""
        if self._is_apart == self.is_exact:
            self._is_apart = not self.is_exact
            self._all_reduce = self._inside if self._is_apart else self._world
            if self._local is None:  # else they have been together
                _sync_module_states(self.module)
        return super().rewrap()

    @property
    def needs_rewrap(self) -> bool:
        """Also when workers begin to train apart."""
        self._know_step()
        return super().needs_rewrap or self._is_apart == self.is_exact

    @property
    def _reducing(self) -> RankGroup | None:
        return self._group if self._is_apart else None

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Outer weights."""
        state = super().state_dict(make)
        return state if self._state is None else self._state.outer_of(state)

    def close(self) -> None:
        """Close lanes and groups."""
        self._all_reduce = None
        for part in (self._world, self._inside):
            if part is not None:
                part.close()
        self._world = self._inside = None
        super().close()
        if self._group is not None:
            destroy([self._group])
        self._group = None


class LocalShardedMode(LocalMode, ShardedMode):
    """``parallel=zero1|zero2|zero3``: shards lie inside each worker."""

    def _open_links(self) -> ShardLinks:
        setting = self.setting
        return build.open_shard_links_inside(
            setting.run, setting.parallel, setting.sync, self._workers, meets_first=self.is_exact
        )

    def _part_model(self) -> None:
        super()._part_model()
        assert self._model is not None
        assert self._links is not None
        self._links.part(self._model)

    def forget(self) -> None:
        """What has parted does not meet at each step again."""
        super().forget()
        if self._local is not None and self._has_parted:
            self._local.timetable = dataclasses.replace(self._local.timetable, warmup_steps=0)

    def _start_of(self, parameter: nn.Parameter) -> int:
        """Shards are rows."""
        assert self._model is not None
        if self._model.full.shape_of(parameter) is None:
            return 0
        spread = self._model.full.spread_of(parameter)
        return spread.boxes[0].offsets[0] * math.prod(spread.shape[1:]) if spread.boxes else 0

    def as_shown(self, name: str, values: Tensor) -> Tensor:
        """Shards as DTensors."""
        assert self._model is not None
        assert self._local is not None
        parameter = self._local.weights.parameters.get(name)
        if parameter is None or self._model.full.shape_of(parameter) is None:
            return values
        return self._model.full.placed(parameter, values)

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Outer weights."""
        if self._local is None:
            return super().state_dict(make)
        with self._local.weights.showing():
            return super().state_dict(make)


class _AtBatchEnd(pl.Callback):
    """Before all other callbacks, so that they see what a batch has led to.

    Args:
        mode: To be told.
    """

    def __init__(self, mode: LocalMode) -> None:
        self._mode = mode

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """A batch is over, on every rank."""
        self._mode.end_batch(trainer)


def _refuse(trainer: pl.Trainer, module: nn.Module) -> None:
    averaging = [
        type(each).__name__
        for each in trainer.callbacks  # type: ignore[attr-defined]  # made in __init__
        if isinstance(each, WeightAveraging | StochasticWeightAveraging)
    ]
    if averaging:
        raise CombinationError(
            f"{averaging[0]} averages the weights of each worker by itself, which are others on each host with "
            "sync=local_sgd: leave it out (outer weights are an average already), or write sync=hierarchical"
        )
    if any(isinstance(each, nn.SyncBatchNorm) for each in module.modules()):
        raise CombinationError(
            "sync_batchnorm=True with sync=local_sgd: statistics would cross between hosts in each forward; write "
            "sync_batchnorm=False (they are averaged with the weights), or sync=hierarchical"
        )
    if has_sparse_gradients(module):
        raise CombinationError(
            "nn.Embedding(sparse=True) with sync=local_sgd: means over workers are of whole tables; write "
            "sparse=False, or sync=hierarchical, which sends only the rows that were used"
        )
