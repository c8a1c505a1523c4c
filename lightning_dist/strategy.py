"""``Trainer(strategy="hierdist")``: Lightning's view of the library. It delegates; the work is a layer below."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import signal
import sys
from collections.abc import Generator, Mapping
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_dist import build
from lightning_dist.capabilities import refuse_combinations, without_effect
from lightning_dist.comm.agreement import DelayedVote
from lightning_dist.config import (
    CHECKPOINT_PRESETS,
    ELASTIC_PRESETS,
    PARALLEL_PRESETS,
    RECOMPUTE_PRESETS,
    SYNC_PRESETS,
    TOPOLOGY_PRESETS,
    CheckpointConfig,
    ElasticConfig,
    ParallelConfig,
    RecomputeConfig,
    SyncConfig,
    TopologyConfig,
    resolve,
)
from lightning_dist.data.loading.agreed import agreed_loader
from lightning_dist.data.loading.loader import ShardedLoader
from lightning_dist.errors import CollectiveError
from lightning_dist.gradsync.data_parallel import explain_unused_parameters, split_arguments
from lightning_dist.heartbeat import pulse_of
from lightning_dist.modes import Mode, PipelineMode, Setting, open_mode
from lightning_dist.modes.kept_feedback import follow_scale, warn_of_second_momentum
from lightning_dist.parallel.materialize import is_on_meta
from lightning_dist.parallel.pipeline.report import PipelineReport
from lightning_dist.parallel.recompute import Recomputation
from lightning_dist.resuming import follow, take_up
from lightning_dist.state_strategy import StateStrategy
from lightning_dist.stopping import Leaving, StopTogether, detach


class HierDistStrategy(StateStrategy):
    """Data-parallel training whose gradient synchronisation knows which ranks share a host.

    Args:
        parallel: What becomes of the model: a name (``"ddp"``), a mapping of options, or a
            :class:`~lightning_dist.config.ParallelConfig`.
        sync: How gradients travel: ``"hierarchical"``, ``"flat"``, ``"bf16"``, a mapping or a
            :class:`~lightning_dist.config.SyncConfig`.
        topology: Who sits where: ``"auto"``, ``"flat"``, a mapping or a
            :class:`~lightning_dist.config.TopologyConfig`.
        recompute: Which blocks run again in backward instead of keeping their activations: ``"off"``, ``"full"``,
            ``"every_n"``, ``"selective"``, a mapping such as ``{"mode": "budget", "budget": "8GB"}`` or a
            :class:`~lightning_dist.config.RecomputeConfig`.
        checkpoint: How checkpoints are written: ``"full"`` (Lightning's own files), ``"sharded"`` or
            ``"async_sharded"`` (folders into which all ranks write), a mapping or a
            :class:`~lightning_dist.config.CheckpointConfig`. Any of them can be loaded, whatever is written.
        elastic: What becomes of the run when a rank or a host fails, under ``hierdist launch``: ``"off"``,
            ``"restart"``, ``"degrade"``, a mapping or an :class:`~lightning_dist.config.ElasticConfig`; ``None`` leaves
            it to the command.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Who launched the processes; found if not given.
        checkpoint_io: How checkpoint files are written.
        precision_plugin: Set by the Trainer.
        process_group_backend: ``"nccl"`` or ``"gloo"``; by device if not given.
        timeout: Deadline of operations between ranks; overrides ``sync.timeout_s``.
        start_method: ``popen`` (the script is started again for each rank), ``spawn``, ``fork`` or ``forkserver``.
        find_unused_parameters: Overrides ``parallel.find_unused_parameters``; here so that a project changes one word.
        static_graph: Overrides ``parallel.static_graph``.
        gradient_as_bucket_view: Overrides ``parallel.gradient_as_bucket_view``.
        broadcast_buffers: Overrides ``parallel.broadcast_buffers``.
        **ddp_arguments: Further arguments of :class:`~torch.nn.parallel.DistributedDataParallel`.

    Raises:
        ConfigError: An option has a wrong name or value; before any process is started.
    """

    def __init__(
        self,
        parallel: str | Mapping[str, Any] | ParallelConfig = "ddp",
        sync: str | Mapping[str, Any] | SyncConfig = "hierarchical",
        topology: str | Mapping[str, Any] | TopologyConfig = "auto",
        *,
        recompute: str | Mapping[str, Any] | RecomputeConfig = "off",
        checkpoint: str | Mapping[str, Any] | CheckpointConfig = "full",
        elastic: str | Mapping[str, Any] | ElasticConfig | None = None,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: str = "popen",
        **ddp_arguments: Any,
    ) -> None:
        parallel_config, self._ddp_arguments = split_arguments(
            resolve("parallel", parallel, ParallelConfig, PARALLEL_PRESETS),
            ddp_arguments,
            own=inspect.signature(HierDistStrategy.__init__).parameters,
        )
        sync_config = resolve("sync", sync, SyncConfig, SYNC_PRESETS)
        if timeout is not None:
            sync_config = dataclasses.replace(sync_config, timeout_s=timeout.total_seconds())
        topology_config = resolve("topology", topology, TopologyConfig, TOPOLOGY_PRESETS)
        self.recompute_config = resolve("recompute", recompute, RecomputeConfig, RECOMPUTE_PRESETS)
        checkpoint_config = resolve("checkpoint", checkpoint, CheckpointConfig, CHECKPOINT_PRESETS)
        refuse_combinations(parallel_config, topology_config, self.recompute_config, sync_config)
        super().__init__(
            parallel_config,
            sync_config,
            topology_config,
            checkpoint_config,
            elastic=None if elastic is None else resolve("elastic", elastic, ElasticConfig, ELASTIC_PRESETS),
            process_group_backend=process_group_backend,
            start_method=start_method,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._forward_redirection = _DDPForwardRedirection()
        self._layer_sync_applied = False
        self._failed = False
        self._recomputation: Recomputation | None = None
        self._stopping: StopTogether | None = None

    def __repr__(self) -> str:
        """Lightning shows it when it refuses a strategy: the Trainer of the other package refuses this one."""
        name, parallel, sync = type(self).__name__, self.parallel_config.mode, self.sync_config.algorithm
        described = f"{name}(parallel={parallel!r}, sync={sync!r})"
        if "pytorch_lightning" in sys.modules:
            described += " (for lightning.pytorch.Trainer: 'import lightning.pytorch as pl', not pytorch_lightning)"
        return described

    @property
    def recomputation(self) -> Recomputation | None:
        """What is recomputed in the present fit; ``None`` for nothing."""
        return self._recomputation

    # -- starting -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """Place the model, wrap it if it is to be trained, and make the optimizers."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        assert self.lightning_module is not None
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        self._failed = False
        self._was_on_meta = is_on_meta(self.lightning_module)
        if is_fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
            self._layer_sync_applied = True
        self.precision_plugin.convert_module(self.lightning_module)
        mode = self._mode = self._current_mode()
        if is_fitting:
            self._stop_together(trainer)
            self._recompute_blocks()
            self.model = mode.wrap(trainer)
            self.setup_optimizers(trainer)
            mode.check_optimizers(self.optimizers)
            warn_of_second_momentum(mode, self.optimizers)
            follow_scale(mode)
            self._open_saver(trainer, mode)
        else:
            detach(trainer)
            self.model = mode.place(trainer)
        self.setup_precision_plugin()
        if is_fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _current_mode(self) -> Mode:
        """The one that has outlived the call before, if it is this module's."""
        assert self._run is not None
        assert self.lightning_module is not None
        if self._mode is not None and self._mode.module is self.lightning_module:
            return self._mode
        setting = Setting(
            run=self._run,
            parallel=self.parallel_config,
            sync=self.sync_config,
            ddp_arguments=self._ddp_arguments,
            precision=self.precision_plugin,
            agreement=self._agreement,
            announce=self._announce,
        )
        return open_mode(setting, self.lightning_module)

    def _stop_together(self, trainer: pl.Trainer) -> None:
        assert self._run is not None
        agreement = build.open_agreement(self._run) if self.world_size > 1 else None
        self._stopping = StopTogether(
            DelayedVote(agreement, delay=self._steps_apart),
            self._run.collectives.where,
            saving_at_once=self._saving_at_once,
            leaving=self._leaving(trainer),
        )
        self._stopping.attach(trainer)

    @property
    def _steps_apart(self) -> int:
        """By how many steps ranks may drift apart."""
        served = self.sync_config.sparse.serves_above_bytes is not None
        return self.sync_config.parameter_server.steps_apart if served else 1

    def _leaving(self, trainer: pl.Trainer) -> Leaving:
        has_agent = self.launched.agent is not None
        saves = has_agent or self.checkpoint_config.is_sharded
        pulse = pulse_of(trainer)
        orders: dict[str, Any] = {}
        if pulse is not None:
            orders = {"order": pulse.order, "answer": pulse.answer}
        return Leaving(
            **orders,
            save=functools.partial(self._save_to_stop, trainer) if saves else None,
            is_writing=lambda: self._saver is not None and self._saver.is_busy,
            signals=(signal.SIGUSR1,) if has_agent else (),
        )

    @property
    def is_anyone_writing(self) -> bool:
        """Whether a rank was writing a checkpoint a batch ago; alike on all ranks."""
        return self._stopping is not None and self._stopping.is_anyone_writing

    def _recompute_blocks(self) -> None:
        assert self._run is not None
        assert self.lightning_module is not None
        self._recomputation = build.open_recomputation(self._run, self.lightning_module, self.recompute_config)
        if self._recomputation is not None:
            self._recomputation.attach()
            rank_zero_info(self._recomputation.describe())

    def _settle_recomputation(self) -> None:
        """After a backward: the first one has measured what a budget is to be compared with."""
        if self._recomputation is not None and self._recomputation.settle() is not None:
            rank_zero_info(self._recomputation.describe())
            if self._recomputation.shortfall is not None:
                rank_zero_warn(self._recomputation.shortfall)

    def _announce(self, text: str) -> None:
        """Say once which way things go, and what was set but does nothing here."""
        assert self._run is not None
        rank_zero_info(text)
        for said in without_effect(
            self.sync_config,
            self.topology_config,
            self.parallel_config,
            self.recompute_config,
            self.elastic_config,
            num_hosts=self._run.cluster.num_hosts,
            device_type=self.root_device.type,
            has_agent=self.launched.agent is not None,
        ):
            rank_zero_warn(said)

    def model_to_device(self) -> None:
        """Move the model to this rank's device."""
        assert self.model is not None
        self.model.to(self.root_device)

    # -- training -----------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Stamp events with the step; wrap the model anew if other parameters than before want gradients."""
        assert self.lightning_module is not None
        self.events.step = self.lightning_module.global_step
        self._log_saved()
        if self._mode is not None and self._mode.needs_rewrap:
            self._settle_copy()  # wrapping broadcasts parameters
            self.model = None  # the old wrapper's autograd hooks end with it
            self.model = self._mode.rewrap()
        if self._mode is not None:
            self._mode.begin_batch(batch_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's step."""
        assert self._mode is not None
        with self._naming_failures("training_step"):
            return self._mode.training_step(super().training_step, *args, **kwargs)

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Let the mode know."""
        if self._mode is not None:
            self._mode.before_backward(closure_loss)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run backward; a failed collective inside it is raised as such."""
        running = self._mode.running_backward() if self._mode is not None else contextlib.nullcontext()
        with self._naming_failures("backward"), running:
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Let the mode know."""
        if self._mode is not None:
            self._mode.after_backward()
        with self._naming_failures("backward"):
            self._settle_recomputation()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Keep gradients local inside, as under accumulation."""
        with self._mode.no_sync() if self._mode is not None else contextlib.nullcontext():
            yield

    def on_train_start(self) -> None:
        """Streamed data go on where the checkpoint was saved, if there is one."""
        assert self.lightning_module is not None
        take_up(self.lightning_module.trainer)
        if self._mode is not None:
            self._mode.begin_training(self.lightning_module.trainer)
        if self._stopping is not None:
            self._stopping.begin()

    def on_train_end(self) -> None:
        """Let the mode know."""
        if self._mode is not None:
            self._mode.end_training()
        self._finish_saving()

    def pipeline_report(self) -> PipelineReport | None:
        """How this rank's pipeline has worked in the present fit; ``None`` where there is none. Every rank calls it."""
        return self._mode.pipeline_report() if isinstance(self._mode, PipelineMode) else None

    def gradient_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of all gradients as one vector, alike on all ranks, which all must call it.

        In ``on_before_optimizer_step`` it is the norm before clipping:
        ``self.log("grad_norm", self.trainer.strategy.gradient_norm())``.

        Args:
            norm_type: Which norm; ``math.inf`` is the largest absolute value.
        """
        assert self._mode is not None, "there are gradients only in a fit"
        return self._mode.gradient_norm(norm_type)

    @contextlib.contextmanager
    def _naming_failures(self, what: str) -> Generator[None, None, None]:
        explaining = self._mode.explaining() if self._mode is not None else contextlib.nullcontext()
        with super()._naming_failures(what), explaining:
            yield

    @property
    def _data_group(self) -> dist.ProcessGroup | None:
        return None if self._mode is None else self._mode.data_group

    # -- validating, testing, predicting: no gradients; ranks may differ in their number of batches --------------------

    def on_validation_start(self) -> None:
        """Let the mode know how many batches come; callbacks may swap other weights in."""
        self._settle_copy()
        if self._mode is not None:
            self._mode.begin_evaluation(self._num_batches())

    on_test_start = on_predict_start = on_validation_start

    def on_validation_end(self) -> None:
        """Let the mode know."""
        if self._mode is not None:
            self._mode.end_evaluation()

    on_test_end = on_predict_end = on_validation_end

    def _num_batches(self) -> list[int | float]:
        """Of each loader of the present evaluation; infinite where it cannot say."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
        return list(loop.max_batches)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own step."""
        return self._evaluate("validation_step", self.precision_plugin.val_step_context(), *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own step."""
        return self._evaluate("test_step", self.precision_plugin.test_step_context(), *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own step."""
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context(), *args, **kwargs)

    def _evaluate(self, step: str, context: contextlib.AbstractContextManager[None], *args: Any, **kwargs: Any) -> Any:
        assert self._mode is not None
        with self._naming_failures(step), context:
            return self._mode.evaluate(step, *args, **kwargs)

    def process_dataloader(self, dataloader: object) -> object:
        """Tell loaders of streamed data who reads, and make training loaders end on all ranks at once."""
        dataloader = super().process_dataloader(dataloader)
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        policy = self.parallel_config.uneven_inputs
        if trainer is not None and isinstance(dataloader, ShardedLoader) and dataloader.role == "train":
            follow(trainer, dataloader)
        if trainer is None or not trainer.training or self._agreement is None or policy == "off":
            return dataloader
        return agreed_loader(dataloader, exchange=self._agreement.exchange, on_uneven=policy)

    # -- ending ------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Explain what the reducer says of unused parameters, and let the other ranks know why this one ends."""
        self._settle_copy()
        explain_unused_parameters(exception)
        if isinstance(exception, SIGTERMException):  # all ranks stop at this step
            return
        if self._run is not None and not isinstance(exception, CollectiveError):
            self._run.leave_word(exception)
        self._failed = True
        if self._mode is not None:
            self._mode.abort(f"{type(exception).__name__}: {exception}")

    def teardown(self) -> None:
        """Unwrap the model, end lanes and groups. Safe to call twice."""
        stays = self._mode is not None and self._mode.outlives_call and not self._failed
        self._settle_copy()
        try:
            if self._recomputation is not None:
                self._recomputation.release()
                self._recomputation = None
            if not stays:
                self._unwrap_model()
            if self._layer_sync_applied and self._layer_sync is not None and self.model is not None:
                self.model = self._layer_sync.revert(self.model)
            self._layer_sync_applied = False
            super().teardown()
        except Exception as error:
            if not self._failed:
                raise
            rank_zero_warn(f"after the failure, teardown failed too: {type(error).__name__}: {error}")
        finally:
            if not stays:
                self._close_run()

    def _unwrap_model(self) -> None:
        if self.model is not None:
            self.model = self.lightning_module
        if self._mode is not None:
            self._mode.release(failed=self._failed)

    def _close_run(self) -> None:
        opened = (self._presence, self._saver, self._stopping, self._mode, self._agreement, self._run)
        self._presence = self._saver = self._stopping = self._mode = self._agreement = self._run = None
        for part in opened:
            if part is not None:
                part.close()


# torch.compile(LightningModule) is allowed for a list of classes only (lightning.pytorch.utilities.compile); what it
# needs of the strategy is what DDPStrategy does, and this one does the same.
DDPStrategy.register(HierDistStrategy)
