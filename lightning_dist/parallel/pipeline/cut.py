"""Which rank of a pipeline holds which parameter and buffer of a model; pure, but for the model it looks at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from lightning_dist.parallel.pipeline.layers import Layer, LayeredModel
from lightning_dist.parallel.pipeline.shared import Place


@dataclass(frozen=True)
class Cut:
    """A model cut into stages.

    Attributes:
        model: Its layers.
        counts: Layers of each stage.
        positions: Which of the pipeline's ranks has each stage.
        stages_of: Tensor -> the stages that use it, in order; for every parameter and buffer of the model.
        tensors: Every parameter and buffer once, in the order of the model's names.
    """

    model: LayeredModel
    counts: tuple[int, ...]
    positions: tuple[int, ...]
    stages_of: dict[Tensor, tuple[int, ...]]
    tensors: tuple[Tensor, ...]

    def layers_of(self, stage: int) -> tuple[Layer, ...]:
        """The layers of a stage."""
        start = sum(self.counts[:stage])
        return self.model.layers[start : start + self.counts[stage]]

    def holders(self, tensor: Tensor) -> tuple[int, ...]:
        """The pipeline's ranks that hold a tensor, by their place, each once."""
        return tuple(sorted({self.positions[stage] for stage in self.stages_of[tensor]}))

    def owner(self, tensor: Tensor) -> int:
        """The rank whose values count: that of the first stage that uses it."""
        return self.positions[self.stages_of[tensor][0]]

    def beside(self, module: nn.Module) -> list[nn.Parameter]:
        """Parameters in no layer, which belong to the last stage."""
        inside = {p for layer in self.model.layers for part in layer.modules for p in part.parameters()}
        return [parameter for parameter in module.parameters() if parameter not in inside]

    def shared(self) -> dict[tuple[int, ...], list[nn.Parameter]]:
        """Ranks -> the parameters that they, and no others, hold together; where they are several."""
        found: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for tensor in self.tensors:
            holders = self.holders(tensor)
            if len(holders) > 1 and isinstance(tensor, nn.Parameter):
                found.setdefault(holders, []).append(tensor)
        return found

    def with_tensors(self, replaced: Mapping[Tensor, Tensor], shown: Mapping[Tensor, Tensor]) -> Cut:
        """The same cut, after some of the model's tensors have been replaced by others.

        Args:
            replaced: Old -> new.
            shown: Old -> another one that the model has in its place at times.
        """
        new_ones = ((new, self.stages_of[old]) for old, new in (*replaced.items(), *shown.items()))
        stages_of = {**self.stages_of, **dict(new_ones)}
        return replace(self, stages_of=stages_of, tensors=tuple(replaced.get(each, each) for each in self.tensors))

    def aliased(self, position: int) -> list[tuple[nn.Parameter, list[Place]]]:
        """Parameters that several stages of one rank use, with the places where the later ones hold them."""
        found = []
        for tensor in self.tensors:
            here = [stage for stage in self.stages_of[tensor] if self.positions[stage] == position]
            if len(here) > 1 and isinstance(tensor, nn.Parameter):
                found.append((tensor, [place for stage in here[1:] for place in self._places(tensor, stage)]))
        return found

    def _places(self, parameter: nn.Parameter, stage: int) -> list[Place]:
        return [
            (inner, name)
            for layer in self.layers_of(stage)
            for module in layer.modules
            for inner in module.modules()
            for name, held in inner._parameters.items()
            if held is parameter
        ]


def cut_model(module: nn.Module, model: LayeredModel, counts: Sequence[int], positions: Sequence[int]) -> Cut:
    """Find out what each stage uses.

    Args:
        module: The user's, which holds the layers and perhaps more.
        model: Its layers.
        counts: Layers of each stage.
        positions: Which of the pipeline's ranks has each stage.
    """
    last = len(counts) - 1
    users: dict[Tensor, set[int]] = {}
    start = 0
    for stage, count in enumerate(counts):
        for layer in model.layers[start : start + count]:
            for part in layer.modules:
                for tensor in (*part.parameters(), *part.buffers()):
                    users.setdefault(tensor, set()).add(stage)
        start += count
    tensors = (*module.parameters(), *module.buffers())
    stages_of = {tensor: tuple(sorted(users.get(tensor, {last}))) for tensor in tensors}
    return Cut(model, tuple(counts), tuple(positions), stages_of, tensors)


def cost_of(layer: Layer) -> float:
    """A layer's cost: the values it multiplies with; an embedding only looks up, and norms and biases are small."""
    looked_up = {
        module.weight
        for part in layer.modules
        for module in part.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    multiplied = {parameter for part in layer.modules for parameter in part.parameters()}
    tied = {  # an embedding's weight that is also multiplied with, by an output layer in the same part
        module.weight
        for part in layer.modules
        for module in part.modules()
        if isinstance(module, nn.Linear) and module.weight in looked_up
    }
    return 1.0 + sum(parameter.numel() for parameter in multiplied - looked_up | tied)
