"""A strategy's state: what goes into a checkpoint, how it is written, and how it comes back."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import warnings
import zlib
from collections.abc import Generator, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_dist import build
from lightning_dist.capabilities import keeps_processes
from lightning_dist.checkpoint import sharded
from lightning_dist.checkpoint.catalog import Checkpoint
from lightning_dist.checkpoint.lineage import Lineage, step_of
from lightning_dist.checkpoint.manifest import MARKER_FILE
from lightning_dist.checkpoint.storage import open_folder
from lightning_dist.comm.host_relay import HostRelay
from lightning_dist.config import CheckpointConfig, ElasticConfig, ParallelConfig, SyncConfig, TopologyConfig
from lightning_dist.elastic.agent_folder import tell_options, tell_sizes
from lightning_dist.elastic.detect.phases import Phase
from lightning_dist.elastic.detect.pulse import Pulse
from lightning_dist.elastic.policy.sizes import sizes_of
from lightning_dist.errors import CheckpointError
from lightning_dist.heartbeat import pulse_of
from lightning_dist.modes import Mode, checkpoints
from lightning_dist.modes.kept_feedback import forget_feedback, warn_of_lost_feedback, warn_of_lost_workers
from lightning_dist.modes.mode import unwrapped
from lightning_dist.parallel.materialize import is_on_meta
from lightning_dist.rank_strategy import RankStrategy
from lightning_dist.resized import KeptBatch, ScaledRate
from lightning_dist.restarting import GoingOn, Ways, checkpoint_folder, interrupted_path, older_interrupted
from lightning_dist.snapshots import MemorySnapshots
from lightning_dist.stopping import Asked, memory_outlives


class StateStrategy(RankStrategy):
    """Base of :class:`~lightning_dist.strategy.HierDistStrategy`, which makes the mode that states come from.

    Whole tensors under the original names, or, in a sharded checkpoint, what each rank holds of them.

    Args:
        parallel: Mode and options.
        sync: How gradients travel.
        topology: Who sits where.
        checkpoint: How checkpoints are written.
        elastic: What is to become of failures; ``None``: the launcher knows.
        **others: Arguments of :class:`~lightning_dist.rank_strategy.RankStrategy`.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        sync: SyncConfig,
        topology: TopologyConfig,
        checkpoint: CheckpointConfig,
        *,
        elastic: ElasticConfig | None = None,
        **others: Any,
    ) -> None:
        super().__init__(parallel, sync, topology, **others)
        self.checkpoint_config = checkpoint
        self.elastic_config = elastic
        self._was_on_meta = False
        self._mode: Mode | None = None
        self._saver: build.CheckpointSaver | None = None
        self._logged: build.Saved | None = None
        self._saves_at_once = False
        self._going_on: GoingOn | None = None
        self._kept: build.Kept | None = None  # what is loaded next
        self._presence: socket.socket | None = None  # what is in memory stays there until this run has saved, too

    def setup_environment(self) -> None:
        """Join the other ranks; let the agent of this host know which sizes fit, and what is to become of failures."""
        if self.launched.agent is not None and self.local_rank == 0:  # first: at this size nothing may work
            tell_sizes(self.launched.agent, sizes_of(self.parallel_config))
        super().setup_environment()
        if self.elastic_config is not None and self.launched.agent is not None and self.local_rank == 0:
            tell_options(self.launched.agent, self.elastic_config)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn == TrainerFn.FITTING and self._going_on is None:
            self._going_on = GoingOn(
                trainer,
                self.launched,
                Ways(self.broadcast, self._first_of, self._find_own_kept, is_first_of_host=self.local_rank == 0),
            )
            self._going_on.begin()
            self._follow_size(trainer)

    @property
    def _may_stay(self) -> bool:
        is_wanted = self.elastic_config is not None and self.elastic_config.in_place
        return is_wanted and self.launched.can_stay and keeps_processes(self.parallel_config, self.root_device.type)

    def _follow_size(self, trainer: pl.Trainer) -> None:
        """Add what adapts batch or learning rate to the number of ranks, unless the user has."""
        elastic = self.elastic_config or ElasticConfig()
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # made in __init__
        is_elastic = self.launched.agent is not None or elastic.mode != "off"
        if not is_elastic or any(isinstance(each, ScaledRate | KeptBatch) for each in callbacks):
            return
        is_kept = elastic.batch == "keep"
        callbacks.append(KeptBatch(is_cut=self.parallel_config.stages) if is_kept else ScaledRate(elastic.rate))

    def _open_saver(self, trainer: pl.Trainer, mode: Mode) -> None:
        """At the start of a fit."""
        if self.checkpoint_config.is_sharded:
            assert self._run is not None
            checkpoints.refuse(trainer, mode, self.checkpoint_config)
            self._saver = build.open_checkpoint_saver(self._run, self.checkpoint_config, self._agreement)
            self._saver.on_committed = functools.partial(_tell_committed, pulse_of(trainer))
        if self._going_on is not None:
            self._going_on.leave_trail()
        every = self.checkpoint_config.memory_every_n_steps
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # made in __init__
        callbacks[:] = [each for each in callbacks if not isinstance(each, MemorySnapshots)]
        if every is not None:
            callbacks.append(MemorySnapshots(self, every))

    @property
    def is_anyone_writing(self) -> bool:
        """Whether a rank was writing a checkpoint a batch ago; alike on all ranks."""
        return False

    def ask_who_writes(self) -> bool:
        """Whether a rank is writing a checkpoint now; every rank calls it."""
        return self._saver is not None and self._saver.is_anyone_busy()

    def await_memory(self, timeout_s: float) -> bool:
        """Wait for a checkpoint that goes to memory only, this rank for itself; whether none is being written now.

        Args:
            timeout_s: How long, in seconds.
        """
        return self._saver is None or self._saver.await_memory(timeout_s)

    @property
    def kept_step(self) -> int | None:
        """The optimizer step of the newest checkpoint that goes to memory."""
        return None if self._saver is None else self._saver.kept_step

    @property
    def begun_step(self) -> int | None:
        """The same, also if it has failed since; alike on all ranks."""
        return None if self._saver is None else self._saver.begun_step

    def keep_in_memory(self, trainer: pl.Trainer, *, at_once: bool = False) -> None:
        """Write a checkpoint that goes to memory only; every rank calls it, between two optimizer steps.

        Args:
            trainer: Whose state.
            at_once: Wait until it is there.
        """
        assert self._saver is not None
        assert self._mode is not None
        pulse = pulse_of(trainer)
        with contextlib.nullcontext() if pulse is None else pulse.entered(Phase.SAVING):
            checkpoints.save(
                self._saver,
                trainer._checkpoint_connector.dump_checkpoint(weights_only=False),
                f"{checkpoint_folder(trainer)}/step={trainer.global_step}.ckpt",
                mode=self._mode,
                optimizers=[unwrapped(each) for each in self.optimizers],
                at_once=at_once,
                in_memory=True,
            )
        self._saver.let_begin()

    def _save_to_stop(self, trainer: pl.Trainer, asked: Asked) -> None:
        """Save where the next start finds it; every rank calls it."""
        assert self._run is not None
        saver, step = self._saver, trainer.global_step
        if saver is not None and memory_outlives(asked, self.checkpoint_config.replica, self._run.cluster):
            if saver.kept_step != step:
                self.keep_in_memory(trainer, at_once=True)
            saver.finish()
            if saver.kept_step == step:
                rank_zero_info(f"hierdist: stops after step {step}, which memory has")
                return
        path = interrupted_path(trainer)
        with self._saving_at_once():
            trainer.save_checkpoint(path)
        rank_zero_info(f"hierdist: stops after step {step}, which is saved as {path}")
        if self.is_global_zero and (saver is None or not saver.has_failed):
            for older in older_interrupted(path):
                self.remove_checkpoint(older)

    def _settle_copy(self) -> None:
        """Before anything but an optimizer's step may change weights, or the optimizer's state."""
        if self._saver is not None:
            self._saver.settle()

    def _finish_saving(self) -> None:
        """At the end of a fit."""
        if self._saver is not None:
            self._saver.finish()
            self._log_saved()
            self._saver.end_memory()

    def _log_saved(self) -> None:
        """Log what the newest checkpoint took, once it is committed."""
        if self._saver is not None and self.lightning_module is not None:
            self._logged = checkpoints.log_saved(self.lightning_module.trainer, self._saver, self._logged)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """A model that is on the meta device until it is spread over ranks can be loaded only then."""
        parallel = self.parallel_config
        if not (parallel.shards or parallel.splits or parallel.stages) or self.lightning_module is None:
            return False
        return self._was_on_meta or is_on_meta(self.lightning_module)  # asked before and after setup

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state; its values on rank 0 only where it is sharded, or as this rank holds it."""
        make = super().lightning_module_state_dict
        if self._saver is not None and self._mode is not None:
            with self._mode.as_held():
                return make()
        return self._mode.state_dict(make) if self._mode is not None else make()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """An optimizer's state; its values on rank 0 only where it is sharded, or as this rank holds it."""
        make = super().optimizer_state
        if self._saver is not None:
            return dict(unwrapped(optimizer).state_dict())
        return self._mode.optimizer_state(optimizer, make) if self._mode is not None else make(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take whole states; each rank keeps its part. Those of a sharded checkpoint are read now."""
        self._settle_copy()
        opened = checkpoint.get(checkpoints.OPENED)
        if opened is not None:
            assert self._mode is not None
            optimizers = [unwrapped(each) for each in self.optimizers]
            with self._naming_failures("loading a checkpoint"), self._reading_with_host() as relay:
                checkpoints.load_optimizers(opened, self._mode, optimizers, self.global_rank, relay=relay)
            return
        if self._mode is not None:
            states = self._mode.optimizer_states_to_load(self.optimizers, checkpoint["optimizer_states"])
            checkpoint = {**checkpoint, "optimizer_states": states}
            forget_feedback(self._mode)
        super().load_optimizer_state_dict(checkpoint)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint, in the way that was chosen."""
        if self._saver is None or self._mode is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            if self._mode is not None and "optimizer_states" in checkpoint:
                warn_of_lost_feedback(self._mode)
                warn_of_lost_workers(self._mode)
            if self.lightning_module is not None and "optimizer_states" in checkpoint:
                _tell_committed(pulse_of(self.lightning_module.trainer), checkpoint["global_step"])
            return
        path = os.fspath(filepath)
        if self._saves_at_once:
            # Ranks have counted the preempted run's checkpoints, and may have seen the first file of this one.
            path = self.broadcast(path)
        save = functools.partial(
            checkpoints.save,
            self._saver,
            checkpoint,
            mode=self._mode,
            optimizers=[unwrapped(each) for each in self.optimizers],
            storage_options=storage_options,
        )
        if self._saves_at_once:
            checkpoints.save_at_once(save, self._saver, path, moves=self.is_global_zero)
        else:
            save(path)

    @contextlib.contextmanager
    def _saving_at_once(self) -> Generator[None, None, None]:
        """Inside, a checkpoint is whole when saving returns, or not there; for what must not wait for the next step."""
        self._saves_at_once = True
        try:
            yield
        finally:
            self._saves_at_once = False

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; the Trainer's call to save a checkpoint ends with it."""
        super().barrier(name)
        if self._saver is not None:
            self._saver.let_begin()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of any kind; of a sharded one, what this rank needs, from memory if it is there."""
        self._settle_copy()
        if self._kept is not None:
            kept, self._kept = self._kept, None
            return self._load_kept(kept, os.fspath(checkpoint_path))
        with self._naming_failures("looking for a checkpoint"):
            path = self._alike(checkpoints.without_marker(os.fspath(checkpoint_path)))
        loaded = self._load_from_memory(path)
        if loaded is not None:
            return loaded
        with self._naming_failures("looking for a checkpoint"):
            is_sharded = self._is_sharded(path)
        if not is_sharded:
            return super().load_checkpoint(path, weights_only)
        with self._naming_failures("loading a checkpoint"), self._reading_with_host() as relay:
            return self._load_sharded(sharded.open_checkpoint(open_folder(path), relay=relay), relay)

    def _load_from_memory(self, path: str) -> dict[str, Any] | None:
        if self.checkpoint_config.replica == "off" or self._run is None:
            return None
        with self._naming_failures("loading a checkpoint from memory"):
            kept = build.find_kept(self._run, self.checkpoint_config, path)
            if kept is None:
                return None
            try:
                loaded = self._load_kept(kept, path)
            except CheckpointError as error:  # the same on all ranks
                warnings.warn(f"{path} is read from storage: {error}", stacklevel=2)
                return None
        rank_zero_info(f"hierdist: {path} is read from memory: {kept.checkpoint.folder.url}")
        return loaded

    def _load_kept(self, kept: build.Kept, path: str) -> dict[str, Any]:
        """Of a checkpoint in memory; what is damaged is no checkpoint any more, so that the next start leaves it."""
        if self._presence is not None:
            self._presence.close()
        self._presence = kept.presence
        with self._naming_failures("loading a checkpoint from memory"), self._reading_with_host() as relay:
            try:
                return self._load_sharded(kept.checkpoint, relay, stored_at=path)
            except CheckpointError:
                kept.checkpoint.folder.remove(MARKER_FILE)
                raise

    def _find_own_kept(self, folder: str, lineage: Lineage, newer_than: int) -> tuple[str, int] | None:
        """See :class:`~lightning_dist.restarting.Ways`."""
        if self.checkpoint_config.replica == "off" or self._run is None:
            return None
        with self._naming_failures("looking for a checkpoint in memory"):
            kept = build.find_own_kept(self._run, self.checkpoint_config, folder, lineage)
        if kept is None:
            return None
        step = step_of(kept.checkpoint)
        if step < newer_than:
            if kept.presence is not None:
                kept.presence.close()
            return None
        self._kept = kept
        return f"{folder.rstrip('/')}/{kept.name}", step

    def _first_of(self, own: Any) -> Any:
        """What the lowest rank has that has something; every rank calls it."""
        if self._agreement is None:
            return own
        said = self._agreement.exchange(int(own is not None))
        return self.broadcast(own, said.index(1)) if 1 in said else None

    def _load_sharded(
        self, checkpoint: Checkpoint, relay: HostRelay | None, *, stored_at: str | None = None
    ) -> dict[str, Any]:
        held = self._mode.held_state() if self._mode is not None and self.restore_checkpoint_after_setup else None
        return checkpoints.load(checkpoint, held, self.global_rank, self.world_size, stored_at=stored_at, relay=relay)

    def _alike(self, path: str) -> str:
        """This rank's path, or rank 0's where one has found another name: ``last`` may have changed between two looks.

        Hosts may see the same checkpoint under different paths.
        """
        name = path.rstrip("/").rpartition("/")[2]
        if self._agreement is None or len(set(self._agreement.exchange(zlib.crc32(name.encode())))) == 1:
            return path
        said = self.broadcast(path)
        if said != path:
            warnings.warn(f"rank 0 loads {said}, and this rank had found {path}: it loads {said}, too", stacklevel=2)
        return said

    def _is_sharded(self, path: str) -> bool:
        """Alike on all ranks."""
        said = [int(checkpoints.is_sharded(path))]
        if self._agreement is not None:
            said = self._agreement.exchange(said[0])
        if len(set(said)) > 1:
            seeing = ", ".join(str(rank) for rank, is_there in enumerate(said) if is_there)
            raise CheckpointError(
                f"of {len(said)} ranks only {seeing} see a sharded checkpoint at {path}. Do all see the same storage?"
            )
        return bool(said[0])

    def _reading_with_host(self) -> contextlib.AbstractContextManager[HostRelay | None]:
        return build.open_host_reading(self._run, self.sync_config, self._agreement)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, once the one that is being written is there."""
        path = os.fspath(filepath)
        if self._saver is not None and self._saver.has_skipped:  # first: of one just begun nothing is seen
            rank_zero_warn(f"{path} stays, since the checkpoint that was to replace it has been skipped")
        elif not checkpoints.is_sharded(path):
            super().remove_checkpoint(filepath)
        elif self.is_global_zero and self._saver is not None:
            self._saver.once_committed(functools.partial(checkpoints.remove, path))
        elif self.is_global_zero:
            checkpoints.remove(path)


def _tell_committed(pulse: Pulse | None, step: int) -> None:
    if pulse is not None:
        pulse.snapshot(step)
