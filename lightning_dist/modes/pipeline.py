"""``parallel=pipeline``: ranks have some of the layers each, and a batch goes through them in micro-batches.

The schedule runs forward and backward together, inside ``training_step``. The module's own step runs on the rank of
the last stage, once a micro-batch, and gets the pipeline's output where it calls the model; what it logs and returns is
told to the other ranks. The loss that Lightning is given puts the gradients in place when Lightning calls backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_dist import build
from lightning_dist.comm.feedback import Feedback
from lightning_dist.errors import CollectiveError, CombinationError
from lightning_dist.gradsync.part_average import PartAverage
from lightning_dist.modes.clipping import clip_as_before, clip_globally
from lightning_dist.modes.mode import Mode, Seat, unwrapped
from lightning_dist.modes.pipelined_step import PipelinedStep, StepReport, looks_at_old_gradients
from lightning_dist.modes.refusals import refuse_wholes
from lightning_dist.modes.stage_reports import StageReports
from lightning_dist.parallel.batches import check_batches
from lightning_dist.parallel.buffers import BufferSync
from lightning_dist.parallel.full_tensors import FullTensors
from lightning_dist.parallel.held_state import HeldState
from lightning_dist.parallel.norms import GlobalNorm
from lightning_dist.parallel.pipeline import StagedModel, StageLinks
from lightning_dist.parallel.pipeline.channels import clear_frames
from lightning_dist.parallel.pipeline.held_gradients import HeldGradients, check_gradient_hooks
from lightning_dist.parallel.pipeline.metric_states import MetricStates
from lightning_dist.parallel.pipeline.micro_batches import join, samples_of, split_batch
from lightning_dist.parallel.pipeline.report import PipelineReport
from lightning_dist.parallel.pipeline.stage import LayerStage
from lightning_dist.parallel.pipeline.user_steps import (
    GivenOutput,
    StepLogs,
    no_gathers,
    no_logs,
    pipeline_input,
    replay,
)
from lightning_dist.parallel.tensor import keep_kinds_apart, refuse_unsplit, refuse_whole_only


class PipelineMode(Mode):
    """Cuts the model into stages; pipelines that read different data average their gradients."""

    _links: StageLinks | None = None
    _staged: StagedModel | None = None
    _given: GivenOutput | None = None
    _metrics: MetricStates | None = None
    _reports: StageReports | None = None
    _held: HeldGradients | None = None
    _norm: GlobalNorm | None = None
    _buffers: BufferSync | None = None
    _keeps = False  # whether old gradients stay until they are zeroed
    _synchronises = True
    _is_checked = False

    def wrap(self, trainer: pl.Trainer) -> nn.Module:
        """Cut the model, and get ready to average."""
        self._refuse(trainer)
        setting = self.setting
        staged, links, reports = self._open()
        self._norm = self._connect(staged, links)
        self._held = HeldGradients(p for p in self.module.parameters() if staged.is_here(p))
        self._keeps = looks_at_old_gradients(trainer)
        clip_globally(setting.precision, self._norm)
        self._buffers = BufferSync(
            staged.buffers_module,
            links.among_replicas,
            enabled=setting.parallel.broadcast_buffers,
            group=links.data.process_group,
        )
        reports.say_placement()
        return self.module

    def _connect(self, staged: StagedModel, links: StageLinks) -> GlobalNorm:
        """Get ready to average gradients over pipelines."""
        setting = self.setting
        self._averages, self._late = build.average_stages(staged, links, parallel=setting.parallel, sync=setting.sync)
        return GlobalNorm(setting.run.collectives, tensor=links.tensor, stages=links.pipeline, counts=staged.counts)

    def place(self, trainer: pl.Trainer) -> nn.Module:
        """Cut the model."""
        self._open()
        return self.module

    def _open(self) -> tuple[StagedModel, StageLinks, StageReports]:
        setting = self.setting
        if setting.ddp_arguments:
            names = ", ".join(setting.ddp_arguments)
            rank_zero_warn(f"{names}: no effect with pipeline stages; they are DistributedDataParallel's")
        links = self._links = build.open_stage_links(setting.run, setting.parallel, setting.sync)
        staged = self._staged = build.cut_into_stages(
            self.module, links, run=setting.run, parallel=setting.parallel, sync=setting.sync
        )
        self._given = GivenOutput(staged.cut.model, type(self.module).__name__)
        self._metrics = MetricStates(self.module, links.data.process_group)
        reports = self._reports = StageReports(setting, staged, links)
        return staged, links, reports

    def _refuse(self, trainer: pl.Trainer) -> None:
        """What is not right with stages, whatever the model.

        Raises:
            CombinationError: The run has some of it.
        """
        if not self.module.automatic_optimization:
            raise CombinationError(
                "manual optimization with parallel=pipeline: the schedule runs backward itself; write parallel=ddp"
            )
        refuse_wholes(
            trainer,
            self.module,
            self.setting.precision,
            averages="all parameters, of which a rank of a pipeline has some: write parallel=ddp, zero1, zero2 or "
            "zero3",
            scaler="its scaler scales the loss after the schedule has run backward; write precision=bf16-mixed",
            batch_norm=": stages of a pipeline do not run at the same time on all ranks; write sync_batchnorm=False",
        )

    def check_optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Refuse what looks at all parameters at once, and, where layers are split, what was made before."""
        assert self._staged is not None
        if self._staged.split is not None:
            refuse_unsplit(optimizers, self._staged.split)
            for optimizer in optimizers:
                refuse_whole_only(optimizer)
        for optimizer in optimizers:
            keep_kinds_apart(optimizer)
            if isinstance(optimizer, torch.optim.LBFGS):
                raise CombinationError(
                    "LBFGS needs all parameters on one rank, and calls backward several times a step; write "
                    "parallel=ddp"
                )

    def begin_batch(self, batch_idx: int) -> None:
        """At the first batch of an epoch, see whether the ranks of a pipeline read the same."""
        assert self._staged is not None
        self._is_checked = self._is_checked and batch_idx > 0
        self._staged.runner.trained = tuple(p.requires_grad for p in self.module.parameters())

    # -- training ------------------------------------------------------------------------------------------------------

    def training_step(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of a batch through the stages."""
        assert self._staged is not None
        assert self._links is not None
        assert self._held is not None
        assert self._given is not None
        assert self._metrics is not None
        assert self._reports is not None
        staged, setting = self._staged, self.setting
        batch, rest = args[0], args[1:]
        self._check_batch(batch)
        accumulation = self._accumulation()
        if not self._reports.is_begun:
            check_gradient_hooks(self.module)
        with setting.precision.train_step_context():
            schedule, count = cut = staged.runner.cut(samples_of(batch))
            self._reports.begin_batch(cut, samples_of(batch))
            parts = split_batch(batch, count)
            step = PipelinedStep(
                self.module,
                parts,
                rest,
                kwargs,
                run=setting.run,
                staged=staged,
                links=self._links,
                given=self._given,
                metrics=self._metrics,
                scale=1 / accumulation,
                sums=setting.parallel.pipeline.loss_reduction == "sum",
            )
            self._metrics.begin()
            for average in self._all_averages():
                average.before_backward()
            if self._buffers is not None:
                self._buffers.before_forward()
            start_ns = setting.run.events.clock_ns()
            with self._closing_on_failure(), staged.running(), staged.aliases.in_place(), no_logs(self.module):
                staged.runner.train(schedule, parts, step.inputs, step.loss_of, self._on_last_gradient)
        self._synchronise()
        self._held.take()
        report = self._tell(step.report() if staged.runner.last is not None else None)
        self._reports.end_batch(cut, start_ns)
        with setting.precision.train_step_context():  # self.log keeps what it is given in this type
            replay(self.module, report.logs)
        assert report.loss is not None, "a training step has one"
        loss = self._held.loss(report.loss.to(setting.run.device), 1 / accumulation)
        return {**report.result, "loss": loss} if isinstance(report.result, Mapping) else loss

    def _accumulation(self) -> int:
        """Micro-steps of the present window."""
        trainer, held = self.module.trainer, self._held
        assert held is not None
        number = int(trainer.accumulate_grad_batches)
        held.begin(window=trainer.fit_loop.batch_idx % number == 0, keeps=self._keeps)
        return number

    def _on_last_gradient(self, stage: LayerStage) -> None:
        average = self._averages.get(stage.stage_index)
        if average is not None and self._synchronises:
            average.start()

    def _synchronise(self) -> None:
        assert self._staged is not None
        if not self._synchronises:
            return
        if self._late is not None:
            self._late.start()
        for average in self._all_averages():
            average.after_backward()
        self._staged.shared.sum_gradients()

    def _all_averages(self) -> list[PartAverage]:
        return [*self._averages.values(), *([self._late] if self._late is not None else [])]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A window of accumulation goes on."""
        self._synchronises = False
        try:
            if self._buffers is None:
                yield
            else:
                with self._buffers.window():
                    yield
        finally:
            self._synchronises = True

    def gradient_norm(self, norm_type: float) -> torch.Tensor:
        """One sum over the ranks of the pipeline."""
        if self._norm is None:
            return super().gradient_norm(norm_type)
        return self._norm.total(self.module.parameters(), norm_type)

    def _check_batch(self, batch: Any) -> None:
        assert self._links is not None
        assert self._metrics is not None
        if not self._is_checked:
            self._is_checked = True
            self._metrics.find()
            check_batches(
                batch,
                self.setting.run.collectives,
                self._links.readers,
                self.setting.run.device,
                doing="belong to one pipeline",
            )

    def end_training(self) -> None:
        """Say how long ranks idled."""
        report = self.pipeline_report()
        if report is not None:
            rank_zero_info(report.describe())

    def pipeline_report(self) -> PipelineReport | None:
        """How this rank's pipeline has worked in the present fit; ``None`` before its first batch. Collective."""
        return None if self._reports is None else self._reports.report()

    # -- what the last stage says --------------------------------------------------------------------------------------

    def _tell(self, report: StepReport | None) -> StepReport:
        assert self._staged is not None
        assert self._metrics is not None
        told: StepReport = self._staged.gather.tell(report, teller=self._staged.cut.positions[-1])
        if report is None:
            self._metrics.learn(told.metrics)
        return told

    @contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        """A rank that fails inside a schedule closes its connections, so that its neighbours need not wait."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, CollectiveError):
                clear_frames(error)  # they refer to the connection that failed
            else:
                self.setting.run.leave_word(error)
            self._hang_up()
            raise

    def _hang_up(self) -> None:
        if self._staged is not None:
            for stage in self._staged.stages:
                stage.clear_runtime_states()
        if self._links is not None:
            self._links.hang_up()

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def evaluate(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """Forward of a batch through the stages; the module's step runs on the last one, with the whole batch."""
        assert self._staged is not None
        assert self._given is not None
        assert self._metrics is not None
        staged = self._staged
        batch = args[0]
        self._check_batch(batch)
        _, count = staged.runner.cut(samples_of(batch))
        parts = split_batch(batch, count)
        inputs = [pipeline_input(self.module, part.values) for part in parts]
        with self._closing_on_failure(), staged.running(keeps_logits=False), no_logs(self.module):
            outputs = staged.runner.forward(parts, inputs if staged.runner.has_first else [()] * len(parts))
        report = None
        if staged.runner.last is not None:
            logs = StepLogs(self.module)
            samples = samples_of(batch)
            output = join(outputs, [part.samples for part in parts])
            self._metrics.begin()
            with (
                self._closing_on_failure(),
                self._given.for_step(step, output, pipeline_input(self.module, batch)),
                logs.collecting(float(samples), samples),
                self._metrics.counting(),
                no_gathers(self.module, step),
            ):
                result = getattr(self.module, step)(*args, **kwargs)
            report = StepReport(None, logs.combined(), result, self._metrics.news())
        told = self._tell(report)
        replay(self.module, told.logs)
        return told.result

    def begin_evaluation(self, num_batches: list[int | float]) -> None:
        """In a fit, bring buffers to the first pipeline's state once."""
        self._is_checked = False
        if self._buffers is not None:
            self._buffers.sync()

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same stages."""
        return None if self._links is None else self._links.data.process_group

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Values on rank 0 only."""
        assert self._staged is not None, "the module is wrapped or placed"
        return self._staged.hooks.state_dict_of(make, keep=self.setting.run.rank == 0)

    def optimizer_state(self, optimizer: Any, make: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Values on rank 0 only."""
        assert self._staged is not None
        return self._staged.optimizer_state(unwrapped(optimizer), keep=self.setting.run.rank == 0)

    @property
    def feedback(self) -> Feedback | None:
        """Of the lanes between replicas."""
        return None if self._links is None or self._links.scatter is None else self._links.scatter.feedback

    @property
    def feedback_seat(self) -> Seat:
        """Among those that hold the same stages."""
        scatter = None if self._links is None else self._links.scatter
        return super().feedback_seat if scatter is None else (scatter.index, len(scatter.members))

    def held_state(self) -> HeldState:
        """Of what several stages hold, one speaks."""
        assert self._staged is not None, "the module is wrapped or placed"
        return self._held_state_of(self._staged.full)

    def _held_state_of(self, full: FullTensors | None) -> HeldState:
        assert self._staged is not None
        assert self._links is not None
        return HeldState(
            self.module,
            self._links.layout,
            self.setting.run.rank,
            full=full,
            axes=frozenset({"pp"}),
            counts=self._staged.counts,
            is_here=self._staged.is_here,
        )

    def as_held(self) -> AbstractContextManager[None]:
        """What is on other ranks stays there."""
        assert self._staged is not None, "the module is wrapped or placed"
        return self._staged.hooks.as_held()

    def optimizer_states_to_load(self, optimizers: list[Any], states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each rank keeps the entries of its stages' parameters, and its part of them."""
        assert self._staged is not None
        return [self._staged.optimizer_state_to_load(*pair) for pair in zip(optimizers, states, strict=False)]

    # -- ending --------------------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Close the connections."""
        self._hang_up()

    def release(self, *, failed: bool) -> None:
        """Make the module whole on every rank, unless others may be gone."""
        clip_as_before(self.setting.precision)
        for average in self._all_averages():
            average.release()
        self._averages, self._late = {}, None
        self._held = self._norm = self._buffers = self._given = self._reports = None
        metrics, self._metrics = self._metrics, None
        if metrics is not None:
            metrics.release()
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.release(whole=not failed)

    def close(self) -> None:
        """End lanes and groups."""
        links, self._links = self._links, None
        if links is not None:
            links.close()

    _averages: Mapping[int, PartAverage] = {}  # replaced, never written to
    _late: PartAverage | None = None
