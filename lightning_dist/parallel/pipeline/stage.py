"""A stage: neighbouring layers of a model on one rank, as torch's pipeline schedules drive it.

The schedules of :mod:`torch.distributed.pipelining` decide what a rank does in which order; a stage does it: takes an
input, runs its layers, hands the output on, and the same backwards. It stands in for torch's ``PipelineStage``, which
sends and receives through lists of operations that the schedule starts and waits for. Here the stage starts messages
itself, through the seam, when the schedule asks for those lists, and waits for one where it is needed; the lists are
empty. So each wait has a deadline and names its stage and micro-batch; buffers live from the asking to the use, so that
their number is that of the micro-batches under way; and micro-batches may differ in size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight

from lightning_dist.errors import CollectiveError, ConfigError
from lightning_dist.events import EventStream
from lightning_dist.parallel.pipeline.channels import (
    ACTIVATION,
    GRADIENT,
    Arriving,
    Boundary,
    Channels,
    Sent,
    TensorKind,
)
from lightning_dist.parallel.pipeline.graph import all_depend, enter, refuse_elsewhere, users_own
from lightning_dist.parallel.pipeline.layers import Layer
from lightning_dist.parallel.pipeline.timeline import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD

Failed = Callable[[Exception, str], None]
"""Told of an error in a stage, and where it was; raises instead if it is not the user's."""


class StageModule(nn.Module):
    """The layers of one stage, in a row.

    Args:
        layers: Neighbours, in their order.
        beside: Parameters that are used where this stage runs but in no layer of it.
    """

    def __init__(self, layers: Sequence[Layer], beside: Sequence[nn.Parameter] = ()) -> None:
        super().__init__()
        self.layers = tuple(layers)
        self.parts = nn.ModuleList(module for layer in layers for module in layer.modules)
        self.beside = nn.ParameterList(beside)

    def forward(self, *values: Any) -> Any:
        """What the last layer returns."""
        result: Any = values
        for layer in self.layers:
            result = layer.call(*as_tuple(result))
        return result


def as_tuple(values: Any) -> tuple[Any, ...]:
    """What a layer returns, as the arguments of the next."""
    if isinstance(values, list | tuple) and not hasattr(values, "_fields"):
        return tuple(values)
    return (values,)


class LayerStage:
    """A stage on this rank, from :meth:`begin` to :meth:`end` for one batch.

    Args:
        module: Its layers.
        index: Which stage it is.
        num_stages: Of how many.
        positions: Which of the pipeline's ranks has each stage.
        channels: To the other ranks.
        events: Where its work is recorded.
        device: Where it computes.
        failed: Told of errors of its layers.
        where: This rank, for messages.
        elsewhere: ``id`` of each parameter that other ranks hold -> its name.
    """

    def __init__(
        self,
        module: StageModule,
        *,
        index: int,
        num_stages: int,
        positions: Sequence[int],
        channels: Channels,
        events: EventStream,
        device: torch.device,
        failed: Failed,
        where: str,
        elsewhere: Mapping[int, str],
    ) -> None:
        # names that torch's schedules use
        self.submod = module
        self.stage_index = index
        self.num_stages = num_stages
        self.group_rank = channels.position
        self.group_size = 1 + max(positions)
        self.stage_index_to_group_rank = dict(enumerate(positions))
        self.device = device
        self.has_backward = True
        self.output_chunks: list[Any] = []
        self._positions = tuple(positions)
        self._channels = channels
        self._events = events
        self._failed = failed
        self._where = where
        self._elsewhere: Mapping[int, str] | None = elsewhere  # None: looked for
        self._inputs: Sequence[Boundary] = ()
        self._outputs: Sequence[Boundary] = ()
        self._on_last: Callable[[LayerStage], None] | None = None
        self._gradients_left = 0
        self._copies_views = False
        self._most_pending: int | None = None
        self._arriving: dict[tuple[str, int], Arriving] = {}
        self._handed: dict[tuple[str, int], tuple[Any, ...]] = {}  # by a stage of the same rank
        self._sent: list[Sent] = []
        self._kept: dict[int, tuple[tuple[Any, ...], tuple[Any, ...]]] = {}
        self._split: dict[int, tuple[Any, ...]] = {}
        self._input_gradients: dict[int, tuple[Tensor | None, ...]] = {}

    def __repr__(self) -> str:
        return f"stage {self.stage_index} of {self.num_stages}"

    @property
    def is_first(self) -> bool:
        """Whether it takes the batch."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether it gives the model's output."""
        return self.stage_index == self.num_stages - 1

    # -- one batch -----------------------------------------------------------------------------------------------------

    def begin(
        self,
        inputs: Sequence[Boundary],
        outputs: Sequence[Boundary],
        *,
        trains: bool,
        on_last_gradient: Callable[[LayerStage], None] | None = None,
        splits_backward: bool = False,
        most_pending: int | None = None,
    ) -> None:
        """Get ready for a batch.

        Args:
            inputs: What comes for each micro-batch; of no interest to the first stage.
            outputs: What this stage gives for each.
            trains: Whether backward follows.
            on_last_gradient: Called when the gradients of all micro-batches are there.
            splits_backward: Whether backward comes in two parts.
            most_pending: Gradients sent before the oldest is waited for; ``None``: all, where ranks could otherwise
                wait for each other.
        """
        self.has_backward = trains
        self._inputs, self._outputs = inputs, outputs
        self._on_last = on_last_gradient
        self._gradients_left = len(outputs)
        self._copies_views = trains and splits_backward  # torch detaches the outputs in place between the two parts
        self._most_pending = most_pending

    def end(self) -> None:
        """Wait for what is still being sent."""
        while self._sent:
            self._sent.pop(0).wait()

    def clear_runtime_states(self) -> None:
        """Forget a batch, finished or not."""
        for state in (self._arriving, self._handed, self._sent, self._kept, self._split, self._input_gradients):
            state.clear()

    # -- messages: the schedule asks for operations, and gets none -----------------------------------------------------

    def get_fwd_recv_ops(self, chunk: int) -> list[Any]:
        """Begin to receive an input."""
        if not self.is_first and self._is_elsewhere(self.stage_index - 1):
            self._arriving[ACTIVATION, chunk] = self._channels.receive(
                self._inputs[chunk],
                kind=ACTIVATION,
                sender=self._positions[self.stage_index - 1],
                what=f"receiving the input of stage {self.stage_index} for micro-batch {chunk}",
                tag=self._tag(self.stage_index, chunk),
            )
        return []

    def get_fwd_send_ops(self, chunk: int) -> list[Any]:
        """Begin to send an output."""
        if not self.is_last and self._is_elsewhere(self.stage_index + 1):
            outputs, _ = self._kept[chunk] if self.has_backward else (self._handed.pop(("output", chunk)), ())
            self._sent.append(
                self._channels.send(
                    [output.detach() for output in outputs],
                    kind=ACTIVATION,
                    receiver=self._positions[self.stage_index + 1],
                    what=f"sending the input of stage {self.stage_index + 1} for micro-batch {chunk}",
                    tag=self._tag(self.stage_index + 1, chunk),
                )
            )
        return []

    def get_bwd_recv_ops(self, chunk: int) -> list[Any]:
        """Begin to receive the gradients of an output."""
        if self.has_backward and not self.is_last and self._is_elsewhere(self.stage_index + 1):
            self._arriving[GRADIENT, chunk] = self._channels.receive(
                _with_gradient(self._outputs[chunk]),
                kind=GRADIENT,
                sender=self._positions[self.stage_index + 1],
                what=f"receiving the gradient of stage {self.stage_index}'s output for micro-batch {chunk}",
                tag=self._tag(self.stage_index + 1, chunk),
            )
        return []

    def get_bwd_send_ops(self, chunk: int) -> list[Any]:
        """Begin to send the gradients of an input."""
        if self.has_backward and not self.is_first and self._is_elsewhere(self.stage_index - 1):
            self._sent.append(
                self._channels.send(
                    self._gradients_to_give(chunk),
                    kind=GRADIENT,
                    receiver=self._positions[self.stage_index - 1],
                    what=f"sending the gradient of stage {self.stage_index - 1}'s output for micro-batch {chunk}",
                    tag=self._tag(self.stage_index, chunk),
                )
            )
            while self._most_pending is not None and len(self._sent) > self._most_pending:
                self._sent.pop(0).wait()
        return []

    def set_local_fwd_input(self, outputs: Any, chunk: int) -> None:
        """Take an input from a stage of this rank."""
        self._handed[ACTIVATION, chunk] = tuple(output.detach() for output in as_tuple(outputs))

    def get_local_bwd_output(self, chunk: int) -> tuple[Tensor, ...]:
        """Give the gradients of an input to a stage of this rank."""
        return tuple(self._gradients_to_give(chunk))

    def set_local_bwd_input(self, gradients: tuple[Tensor, ...], chunk: int) -> None:
        """Take the gradients of an output from a stage of this rank."""
        self._handed[GRADIENT, chunk] = gradients

    # -- work ----------------------------------------------------------------------------------------------------------

    def forward_one_chunk(
        self, chunk: int, args: tuple[Any, ...], kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """Run the layers on a micro-batch; ``args`` are the first stage's."""
        values = args if self.is_first else self._arrived(ACTIVATION, chunk)
        if self.has_backward and not self.is_first:
            values = tuple(v.requires_grad_(k.has_gradient) for v, k in zip(values, self._inputs[chunk], strict=True))
        with self._working(FORWARD, chunk):
            output = self.submod(*enter(values))
            if not self.is_last:
                self._check(as_tuple(output), chunk)
            if self._copies_views and not self.is_last:
                output = tuple(value.clone() if value._is_view() else value for value in as_tuple(output))
        if self.has_backward:
            self._kept[chunk] = (() if self.is_last else as_tuple(output), values)
        elif not self.is_last:
            self._handed["output", chunk] = as_tuple(output)
        return output

    def backward_one_chunk(
        self, chunk: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run backward for a micro-batch: all of it, or only as far as the stage before needs it."""
        if not self.has_backward:
            return
        outputs, inputs = self._kept.pop(chunk)
        gradients: tuple[Tensor | None, ...] | None = None
        found: tuple[Tensor | None, ...] = ()
        if not self.is_last:
            outputs = tuple(o for o, kind in zip(outputs, self._outputs[chunk], strict=True) if kind.has_gradient)
            gradients = self._arrived(GRADIENT, chunk)
        with self._working(BACKWARD if full_backward else BACKWARD_INPUT, chunk), self._outside_autocast():
            roots = [loss] if self.is_last else list(outputs)
            if self._elsewhere is not None:
                refuse_elsewhere(roots, self._elsewhere, stage=self)
                self._elsewhere = None
            self._split[chunk] = ((), (), inputs, [])
            if not roots:  # frozen so far
                found = (None,) * len(inputs)
            elif self.is_first and not full_backward:  # nothing before it waits: all of it is the second part's
                self._split[chunk] = (outputs, gradients, inputs, None)
            elif full_backward or not all_depend(roots, inputs):
                found = stage_backward(loss if self.is_last else outputs, gradients, list(inputs))
            else:
                found, groups = stage_backward_input(roots, gradients, list(inputs), self.submod.parameters())  # type: ignore[arg-type]
                self._split[chunk] = (roots, gradients, inputs, groups)
        self._input_gradients[chunk] = tuple(found)
        if full_backward:
            self._split.pop(chunk, None)
            self._count()

    def backward_weight_one_chunk(self, chunk: int, last_backward: bool = False) -> None:
        """Run the second part of a backward: the gradients of parameters."""
        if not self.has_backward:
            return
        outputs, gradients, inputs, groups = self._split.pop(chunk)
        with self._working(BACKWARD_WEIGHT, chunk), self._outside_autocast():
            if groups is None and outputs:
                stage_backward(outputs, gradients, list(inputs))
            elif groups:
                stage_backward_weight(self.submod.parameters(), groups)
        self._count()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: gradients are reduced as soon as the last one is there."""

    def _count(self) -> None:
        self._gradients_left -= 1
        if self._gradients_left == 0 and self._on_last is not None:
            self._on_last(self)

    def _arrived(self, kind: str, chunk: int) -> tuple[Any, ...]:
        handed = self._handed.pop((kind, chunk), None)
        return self._arriving.pop((kind, chunk)).wait() if handed is None else handed

    def _gradients_to_give(self, chunk: int) -> list[Tensor]:
        """Of each input that has one; zeros for those that were not used."""
        found = self._input_gradients.pop(chunk)
        kinds = self._inputs[chunk]
        return [
            gradient if gradient is not None else torch.zeros(kind.shape, dtype=kind.dtype, device=self.device)
            for gradient, kind in zip(found, kinds, strict=True)
            if kind.has_gradient
        ]

    def _check(self, outputs: tuple[Any, ...], chunk: int) -> None:
        expected = self._outputs[chunk]
        if [kind_of(output) for output in outputs] != list(expected):
            self._refuse(outputs, expected, chunk)

    def _refuse(self, outputs: tuple[Any, ...], expected: Boundary, chunk: int) -> NoReturn:
        got = ", ".join(describe(output) for output in outputs)
        raise ConfigError(
            f"{self} gave {got} for micro-batch {chunk}, and {', '.join(map(str, expected))} for another one of the "
            "same shape; between stages travel tensors whose types and shapes, and whether they have a gradient, "
            "depend on the shapes of the batch only"
        )

    @contextmanager
    def _working(self, kind: str, chunk: int) -> Iterator[None]:
        """Record a piece of work, and say where an error was."""
        try:
            with self._events.measure_work(f"pipeline.{kind}", stage=self.stage_index, micro_batch=chunk):
                yield
        except CollectiveError:
            raise
        except Exception as raised:
            error = users_own(raised)
            said = f"{self._where}: the {kind.replace('_', ' ')} of micro-batch {chunk} in stage {self.stage_index}"
            self._failed(error, said)
            if error is raised:
                raise
            raise error from None

    def _outside_autocast(self) -> torch.autocast:
        """Backward runs in the types that forward chose."""
        return torch.autocast(self.device.type, enabled=False)

    def _is_elsewhere(self, stage: int) -> bool:
        return self._positions[stage] != self.group_rank

    def _tag(self, receiving: int, chunk: int) -> int:
        return chunk * self.num_stages + receiving


def kind_of(value: Any) -> TensorKind | None:
    """What crosses a boundary for a value; ``None`` if it cannot."""
    return TensorKind(tuple(value.shape), value.dtype, value.requires_grad) if isinstance(value, Tensor) else None


def describe(value: Any) -> str:
    """E.g. ``float32 [4, 8]``, or the type of what is no tensor."""
    kind = kind_of(value)
    return type(value).__name__ if kind is None else str(kind)


def _with_gradient(boundary: Boundary) -> Boundary:
    return tuple(kind for kind in boundary if kind.has_gradient)
