"""What a layer does on each rank: its parameters are DTensors, plain tensors come in and go out.

The code around a layer sees plain tensors only: whole ones, or, after a column layer, this rank's features. Between
plain tensors and DTensors stand two hooks a layer. Gradients need nothing more: where a whole input meets split
features, DTensor reduces its gradient over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from lightning_dist.errors import CombinationError, ConfigError
from lightning_dist.parallel.tensor.logits import SplitLogits, mark
from lightning_dist.parallel.tensor.region import SplitRegion
from lightning_dist.parallel.tensor.styles import COLUMN_STYLES, Style


def placements_of(module: nn.Module, style: Style) -> dict[str, Placement]:
    """Where each parameter of a module lives: name -> placement on the tensor-parallel axis.

    A row layer's bias is whole: it is added once, to the sum of the ranks' products.
    """
    if style.dim is None:
        return {name: Replicate() for name, _ in module.named_parameters(recurse=False)}
    placements: dict[str, Placement] = {"weight": Shard(style.dim)}
    if getattr(module, "bias", None) is not None:
        placements["bias"] = Replicate() if style.kind == "row" else Shard(0)
    return placements


class SplitLayer(ParallelStyle):
    """Hooks that make a Linear or an Embedding work on its part; for :func:`parallelize_module`.

    Args:
        path: Of the layer, for messages.
        style: What is split.
        region: Entered after column layers, left before row layers.
        logits: Whether a head may leave its output split.
    """

    def __init__(self, path: str, style: Style, region: SplitRegion, logits: SplitLogits) -> None:
        super().__init__()
        self.path = path
        self.style = style
        self.handles: list[RemovableHandle] = []
        self._region = region
        self._logits = logits

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.handles = [
            module.register_forward_pre_hook(partial(self._before, device_mesh), with_kwargs=True),
            module.register_forward_hook(self._after, prepend=True),
        ]
        return module

    def _before(
        self, mesh: DeviceMesh, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        placement: Placement = Replicate()
        if self.style.kind == "row":
            self._region.leave()
            placement = Shard(-1)
        if args:
            return (self._placed(args[0], mesh, placement), *args[1:]), kwargs
        return args, {**kwargs, "input": self._placed(kwargs.get("input"), mesh, placement)}

    def _placed(self, value: object, mesh: DeviceMesh, placement: Placement) -> Tensor:
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{self.path} is split ({self.style}) and takes one tensor, got {type(value).__name__}; "
                "give it as the first argument or as input="
            )
        return value if isinstance(value, DTensor) else DTensor.from_local(value, mesh, [placement])

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: DTensor) -> Tensor:
        kind = self.style.kind
        split = Shard(output.ndim - 1)
        if kind == "head" and self._logits.are_kept:
            return mark(output.redistribute(placements=[split]))
        placement = split if kind in COLUMN_STYLES else Replicate()
        local = output.redistribute(placements=[placement]).to_local()
        if kind in COLUMN_STYLES:
            self._region.enter(self.path, is_random=module.training)
        return local


class PerHead(ParallelStyle):
    """A module whose parameters are whole on every rank and applied to each rank's own heads.

    Each rank's gradient is the sum over its heads only, and is summed over the ranks. In forward the module sees plain
    tensors in place of its parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.handles: list[RemovableHandle] = []

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.handles = [
            module.register_forward_pre_hook(_lend_local),
            module.register_forward_hook(_take_back, always_call=True, prepend=True),
        ]
        return module


def _lend_local(module: nn.Module, args: tuple[Any, ...]) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        # An attribute of the instance comes before nn.Module's own look-up of parameters.
        vars(module)[name] = cast(DTensor, parameter).to_local(grad_placements=[Partial()])


def _take_back(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    for name, _ in module.named_parameters(recurse=False):
        vars(module).pop(name, None)


class Guard:
    """Refuses a module with parameters that works where activations are split, though the plan does not speak of it.

    Its gradient would be that of each rank's own features, and its parameters would drift apart, silently.

    Args:
        path: Of the module.
        region: Where activations are split.
    """

    def __init__(self, path: str, region: SplitRegion) -> None:
        self._path = path
        self._region = region

    def watch(self, module: nn.Module) -> RemovableHandle:
        """Look at each forward of a module."""
        return module.register_forward_pre_hook(self._before)

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._region.is_open:
            raise CombinationError(
                f"{self._path} ({type(module).__name__}) has parameters and runs between {self._region.opened_by} and "
                "the row layer after it, where each rank has other features; say in the plan what it is: "
                f"{{{self._path!r}: 'per_head'}} if it is applied to those features (each head by itself), "
                f"{{{self._path!r}: 'replicate'}} if it works on activations that are whole, "
                "or column or row if it is one of the layers to split"
            )


def as_placed(placements: tuple[Placement, ...], gradient: Tensor) -> Tensor:
    """A gradient placed as its parameter is; DTensor may compute it whole (embedding) or in summands (per head)."""
    if isinstance(gradient, DTensor) and gradient.placements != placements:
        return gradient.redistribute(placements=placements)
    return gradient


def guarded(modules: Mapping[str, nn.Module], known: frozenset[str], region: SplitRegion) -> list[RemovableHandle]:
    """Watch all modules with parameters of their own that the plan does not speak of; frozen ones may be thawed."""
    return [
        Guard(path, region).watch(module)
        for path, module in modules.items()
        if path not in known and next(module.parameters(recurse=False), None) is not None
    ]
