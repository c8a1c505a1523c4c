"""Runs batches through the stages of this rank: forward and backward by a schedule, or forward alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.config.pipeline import ONE_STAGE, PipelineConfig, for_batch
from lightning_dist.errors import ConfigError
from lightning_dist.parallel.pipeline.channels import Boundary
from lightning_dist.parallel.pipeline.graph import enter
from lightning_dist.parallel.pipeline.micro_batches import MicroBatch, Signature
from lightning_dist.parallel.pipeline.schedules import LossOf, Schedule
from lightning_dist.parallel.pipeline.stage import LayerStage, as_tuple, describe, kind_of
from lightning_dist.parallel.pipeline.timeline import Action

Inputs = Sequence[tuple[Any, ...]]
"""What the first stage is called with, for each micro-batch; empty tuples on other ranks."""


class StageRunner:
    """Drives the stages of one rank; every rank of the pipeline makes it, and calls it with the same batches.

    Args:
        stages: This rank's, in their order.
        config: Schedule and number of micro-batches.
        pipeline: The ranks of the pipeline, in order.
        collectives: The seam.
    """

    def __init__(
        self, stages: Sequence[LayerStage], config: PipelineConfig, pipeline: RankGroup, collectives: Collectives
    ) -> None:
        self.stages = tuple(stages)
        self._config = config
        self._pipeline = pipeline
        self._collectives = collectives
        self._schedules: dict[tuple[str, int], Schedule] = {}
        self._boundaries: dict[tuple[Signature, bool, bool, tuple[bool, ...]], list[tuple[Boundary, Boundary]]] = {}
        self.trained: tuple[bool, ...] = ()  # which of the model's parameters train; the same on all ranks
        self._loss_of: LossOf | None = None
        self.boundaries: list[list[tuple[Boundary, Boundary]]] = []  # of the last batch: [micro-batch][stage here]

    @property
    def has_first(self) -> bool:
        """Whether the first stage is here."""
        return self.stages[0].is_first

    @property
    def last(self) -> LayerStage | None:
        """The last stage, if it is here."""
        return next((stage for stage in self.stages if stage.is_last), None)

    def cut(self, samples: int) -> tuple[str, int]:
        """The schedule and the number of micro-batches for a batch of so many samples."""
        size = self._pipeline.size
        return for_batch(self._config.schedule, size, self._config.micro_batches_for(size), samples)

    def orders(self, schedule: str, count: int) -> list[list[Action]]:
        """What each rank of the pipeline does, in its order."""
        return self._schedule(schedule, count).orders()

    def train(
        self,
        schedule: str,
        parts: Sequence[MicroBatch],
        inputs: Inputs,
        loss_of: LossOf,
        on_last_gradient: Callable[[LayerStage], None],
    ) -> None:
        """Forward and backward of a batch; gradients are added to those of the parameters.

        Args:
            schedule: Its name, by :meth:`cut`.
            parts: Its micro-batches, as many as :meth:`cut` says.
            inputs: Of the first stage.
            loss_of: Called on the last stage with its output.
            on_last_gradient: Called for each stage when all its gradients are there.
        """
        chosen = self._schedule(schedule, len(parts))
        boundaries = self._survey(parts, inputs, trains=True)
        self._loss_of = loss_of
        for number, stage in enumerate(self.stages):
            stage.clear_runtime_states()
            stage.begin(
                [each[number][0] for each in boundaries],
                [each[number][1] for each in boundaries],
                trains=True,
                on_last_gradient=on_last_gradient,
                splits_backward=chosen.splits_backward,
                most_pending=2 * self._pipeline.size if schedule in ONE_STAGE and len(self.stages) == 1 else None,
            )
        chosen.run(inputs)
        self._end()

    def forward(self, parts: Sequence[MicroBatch], inputs: Inputs) -> list[Any]:
        """Forward of a batch; what the last stage gives for each micro-batch, an empty list on other ranks."""
        boundaries = self._survey(parts, inputs, trains=False)
        outputs: list[Any] = []
        for number, stage in enumerate(self.stages):
            stage.clear_runtime_states()
            stage.begin(
                [each[number][0] for each in boundaries], [each[number][1] for each in boundaries], trains=False
            )
        for number, stage in enumerate(self.stages):
            following = self.stages[number + 1] if number + 1 < len(self.stages) else None
            is_next_here = following is not None and following.stage_index == stage.stage_index + 1
            for chunk in range(len(parts)):
                stage.get_fwd_recv_ops(chunk)
                output = stage.forward_one_chunk(chunk, inputs[chunk])
                if stage.is_last:
                    outputs.append(output)
                elif is_next_here and following is not None:
                    following.set_local_fwd_input(output, chunk)
                else:
                    stage.get_fwd_send_ops(chunk)
        self._end()
        return outputs

    def _end(self) -> None:
        for stage in self.stages:
            stage.end()
            stage.clear_runtime_states()
        self._loss_of = None

    def _schedule(self, name: str, count: int) -> Schedule:
        if (name, count) not in self._schedules:
            self._schedules[name, count] = Schedule(name, self.stages, count, self._loss)
        return self._schedules[name, count]

    def _loss(self, output: Any, chunk: int) -> Tensor:
        assert self._loss_of is not None, "only while a batch runs"
        return self._loss_of(output, chunk)

    # -- what crosses the boundaries -----------------------------------------------------------------------------------

    def _survey(
        self, parts: Sequence[MicroBatch], inputs: Inputs, *, trains: bool
    ) -> list[list[tuple[Boundary, Boundary]]]:
        """For each micro-batch and stage here, what comes and what goes; found out once for each shape of a batch.

        Layers may give something else in training than in evaluation, and something else has a gradient when
        parameters are frozen or thawed.
        """
        found = []
        for part, given in zip(parts, inputs, strict=True):
            is_mixed = torch.is_autocast_enabled(self.stages[0].device.type)
            key = (part.signature, is_mixed, trains, self.trained if trains else ())
            if key not in self._boundaries:
                self._boundaries[key] = self._try(given, trains=trains)
            found.append(self._boundaries[key])
        self.boundaries = found
        return found

    def _try(self, given: tuple[Any, ...], *, trains: bool) -> list[tuple[Boundary, Boundary]]:
        """Run the layers once on a micro-batch, without a trace: no backward, random numbers or buffers.

        They get real values: a layer may look things up by them, or measure its output by them.
        """
        found: list[tuple[Boundary, Boundary]] = []
        coming: Boundary = ()
        values = tuple(v.clone() if isinstance(v, Tensor) else v for v in given)  # layers may work in place
        for stage in self.stages:
            if not stage.is_first and stage._is_elsewhere(stage.stage_index - 1):
                coming, values = self._hear(stage._positions[stage.stage_index - 1], stage.stage_index - 1)
            going: Boundary = ()
            if not stage.is_last:
                if not stage.is_first:
                    values = tuple(v.requires_grad_(k.has_gradient) for v, k in zip(values, coming, strict=True))
                going, values = self._run_once(stage, values, trains=trains)
                following = stage.stage_index + 1
                if stage._is_elsewhere(following):
                    self._tell(going, values, stage._positions[following], stage.stage_index)
            found.append((coming, going))
            coming = going
        return found

    def _run_once(
        self, stage: LayerStage, given: tuple[Any, ...], *, trains: bool
    ) -> tuple[Boundary, tuple[Tensor, ...]]:
        devices = [stage.device] if stage.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), kept_buffers(stage.submod), torch.set_grad_enabled(trains):
            outputs = as_tuple(stage.submod(*enter(given)))
        kinds = [kind_of(output) for output in outputs]
        if None in kinds:
            raise ConfigError(
                f"{stage} gave {', '.join(describe(output) for output in outputs)}; between pipeline stages travel "
                "tensors: let the layer return a tensor, or a tuple of tensors"
            )
        return tuple(kind for kind in kinds if kind is not None), tuple(output.detach() for output in outputs)

    def _hear(self, sender: int, stage: int) -> tuple[Boundary, tuple[Tensor, ...]]:
        said: list[Any] = [None]
        device, source, group = self.stages[0].device, self._pipeline.ranks[sender], self._pipeline.process_group
        with self._collectives.operation(f"hearing what stage {stage} gives", self._pipeline):
            dist.recv_object_list(said, src=source, group=group, device=device)
            boundary: Boundary = said[0]  # from our own code
            values = tuple(torch.empty(kind.shape, dtype=kind.dtype, device=device) for kind in boundary)
            for value in values:
                dist.recv(value, source, group)
        return boundary, values

    def _tell(self, boundary: Boundary, values: Sequence[Tensor], receiver: int, stage: int) -> None:
        device, target, group = self.stages[0].device, self._pipeline.ranks[receiver], self._pipeline.process_group
        with self._collectives.operation(f"saying what stage {stage} gives", self._pipeline):
            dist.send_object_list([boundary], dst=target, group=group, device=device)
            for value in values:
                dist.send(value.contiguous(), target, group)


@contextmanager
def kept_buffers(module: torch.nn.Module) -> Iterator[None]:
    """Buffers are afterwards what they were."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in before:
                buffer.copy_(values)
