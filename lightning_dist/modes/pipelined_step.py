"""The module's own training step on the micro-batches of one batch, on the rank of the last stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_dist import build
from lightning_dist.errors import ConfigError
from lightning_dist.parallel.pipeline import StagedModel, StageLinks
from lightning_dist.parallel.pipeline.metric_states import MetricNews, MetricStates
from lightning_dist.parallel.pipeline.micro_batches import MicroBatch, join, map_tensors
from lightning_dist.parallel.pipeline.user_steps import GivenOutput, Logged, StepLogs, no_gathers, pipeline_input


@dataclass
class StepReport:
    """What the rank of the last stage tells the others of a step.

    Attributes:
        loss: Of the whole batch, 0-dim, in CPU memory.
        logs: What the step logged.
        result: What it returned; of a training step, what it returned beside the loss, if that was a mapping.
        metrics: Path -> what it changed in a metric object.
    """

    loss: Tensor | None
    logs: Mapping[str, Logged]
    result: Any = None
    metrics: Mapping[str, MetricNews] = field(default_factory=dict)


class PipelinedStep:
    """The module's training step on the micro-batches of one batch.

    Args:
        module: The user's.
        parts: The micro-batches.
        rest: Further positional arguments of the step.
        kwargs: Keyword arguments of the step.
        run: For the seam and events.
        staged: The model.
        links: Its groups.
        given: Hands the pipeline's output to the step.
        metrics: The module's metric objects.
        scale: What gradients are multiplied by, as under accumulation.
        sums: Whether the loss is a sum over samples, not a mean.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        parts: Sequence[MicroBatch],
        rest: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        run: build.RunContext,
        staged: StagedModel,
        links: StageLinks,
        given: GivenOutput,
        metrics: MetricStates,
        scale: float,
        sums: bool,
    ) -> None:
        self._module = module
        self._parts = parts
        self._rest = rest
        self._kwargs = kwargs
        self._run = run
        self._links = links
        self._given = given
        self._metrics = metrics
        wanted = staged.runner.has_first or staged.runner.last is not None
        self.inputs = [pipeline_input(module, part.values) if wanted else () for part in parts]
        self._logs = StepLogs(module)
        self._losses: list[Tensor] = []
        self._results: list[dict[str, Any]] = []
        self._sums = sums
        self._weigh: Callable[[Any], Any] | None = getattr(module, "pipeline_weight", None)
        self._weights = [float(self._weigh(p.values) if self._weigh is not None else p.samples) for p in parts]
        self._scales = [scale * share for share in self._shares()] if staged.runner.last is not None else []

    def loss_of(self, output: Any, chunk: int) -> Tensor:
        """Run the step on a micro-batch; its loss, as it counts in the whole."""
        part = self._parts[chunk]
        with (
            self._given.for_step("training_step", output, self.inputs[chunk]),
            self._logs.collecting(self._weights[chunk], part.samples),
            self._metrics.counting(),
            no_gathers(self._module, "training_step"),
            self._run.events.measure_work("pipeline.loss", micro_batch=chunk),
        ):
            result = self._module.training_step(part.values, *self._rest, **self._kwargs)
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"{type(self._module).__name__}.training_step returned {type(result).__name__} and no loss; under "
                "parallel=pipeline no batch can be skipped, since the other stages wait for its gradient: return a "
                "loss (0 times the output, for one that is not to count)"
            )
        if loss.numel() != 1:
            raise ConfigError(
                f"{type(self._module).__name__}.training_step returned a loss of shape {list(loss.shape)}: return one "
                "number, as loss.mean()"
            )
        loss = loss.reshape(())
        self._losses.append(loss.detach())
        if isinstance(result, Mapping):
            beside = {key: value for key, value in result.items() if key != "loss"}
            self._results.append(map_tensors(beside, torch.Tensor.detach))
        return loss * self._scales[chunk]

    def report(self) -> StepReport:
        """What the others are to know."""
        dtype = torch.promote_types(self._losses[0].dtype, torch.float32)
        losses = torch.stack([loss.double() for loss in self._losses])
        weights = torch.tensor(self._weights, dtype=torch.float64, device=losses.device)
        counted = torch.where(weights > 0, losses, 0)  # the mean of nothing is NaN
        result = join(self._results, [part.samples for part in self._parts]) if self._results else None
        loss = losses.sum() if self._sums else (counted * weights).sum() / weights.sum()
        loss = self._over_replicas(loss, weights.sum()).to(dtype).cpu()
        return StepReport(loss, self._logs.combined(), result, self._metrics.news())

    def _shares(self) -> list[float]:
        """The part of each micro-batch's loss in the batch's, such that its mean over pipelines is the global one."""
        if self._sums:
            return [1.0] * len(self._parts)
        total = sum(self._weights)
        if self._weigh is not None:
            total = self._mean_over_replicas(total)
        if not total:
            return [0.0] * len(self._parts)
        return [weight / total for weight in self._weights]

    def _mean_over_replicas(self, value: float) -> float:
        links, run = self._links, self._run
        said = torch.tensor([value], dtype=torch.float64, device=run.device)
        if links.data.size > 1:
            run.collectives.all_reduce(said, links.data)
        return float(said) / links.data.size

    def _over_replicas(self, loss: Tensor, weight: Tensor) -> Tensor:
        """The mean over pipelines; of a loss with weights, by weight."""
        links, run = self._links, self._run
        if links.data.size == 1:
            return loss
        counted = weight if self._weigh is not None and not self._sums else torch.ones_like(weight)
        said = torch.stack([loss * counted, counted])
        run.collectives.all_reduce(said, links.data)
        return said[0] / said[1]


def looks_at_old_gradients(trainer: pl.Trainer) -> bool:
    """Whether somebody sees the gradients of the step before when they are zeroed, or zeroes them himself."""
    module, hook = trainer.lightning_module, "on_before_zero_grad"
    callbacks = any(is_overridden(hook, each) for each in trainer.callbacks)  # type: ignore[attr-defined]
    return callbacks or is_overridden(hook, module) or is_overridden("optimizer_zero_grad", module)
