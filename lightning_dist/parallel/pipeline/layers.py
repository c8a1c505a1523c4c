"""What a model says of how it can be cut: its layers in order, each a module or a function of some.

A LightningModule says it by ``pipeline_layers``: a method that returns the list, or a dotted path to a Sequential or
ModuleList, or an attribute with that path. What is in no layer (a parameter of the loss) belongs to the last stage,
where the module's own steps run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_dist.errors import ConfigError
from lightning_dist.parallel.module_tree import has_forward

_SHOWN = 6


class PipelineLayer:
    """A layer that is no module: a function, and what it uses: modules, or parameters and buffers themselves.

    Example::

        def pipeline_layers(self):
            gpt = self.model
            embed = PipelineLayer(gpt.embed, gpt.tokens, gpt.positions)  # or gpt.start, if that is a parameter
            return [embed, *gpt.blocks, PipelineLayer(gpt.logits, gpt.norm, gpt.head)]

    Args:
        function: Called with what the layer before returned; its results, tensors, are what the next is called with.
        *parts: Modules whose parameters and buffers it uses; parameters and buffers that it uses by themselves.
    """

    def __init__(self, function: Callable[..., Any], *parts: nn.Module | Tensor) -> None:
        self.function = function
        self.parts = parts


class BareTensors(nn.Module):
    """Parameters and buffers that a layer's function uses by themselves.

    Args:
        tensors: Whose places are elsewhere in the model.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(str(index), tensor)
            else:
                self.register_buffer(str(index), tensor)


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Attributes:
        name: For messages.
        call: Runs it.
        modules: What it uses.
        paths: Where that is in the model.
    """

    name: str
    call: Callable[..., Any]
    modules: tuple[nn.Module, ...]
    paths: tuple[str, ...]


@dataclass(frozen=True)
class LayeredModel:
    """A model as its layers.

    Attributes:
        layers: In the order in which they run.
        root: The module whose forward they make up together.
        root_name: Its path; empty for the model itself.
    """

    layers: tuple[Layer, ...]
    root: nn.Module
    root_name: str


def find_layers(model: nn.Module, path: str | None) -> LayeredModel:
    """The layers of a model.

    Args:
        model: With ``pipeline_layers``, unless there is a path.
        path: Dotted path to a Sequential or ModuleList, instead of what the model says.

    Raises:
        ConfigError: It does not say, or not rightly; the message says what to write.
    """
    said: Any = path if path is not None else getattr(model, "pipeline_layers", None)
    if callable(said) and not isinstance(said, nn.Module):
        said = said()
    if said is None:
        raise ConfigError(
            f"{type(model).__name__} does not say how it splits into pipeline stages. Give it a method "
            "pipeline_layers(self) that returns its layers in order (modules, or PipelineLayer(function, *modules)), "
            "or the path of an nn.Sequential that holds them all, as parallel.pipeline.layers=model.blocks"
        )
    container = _container(model, said) if isinstance(said, str) else said
    names = _names(model)
    layers = tuple(_layer(model, item, names) for item in list(container))
    _check_once(layers)
    if isinstance(container, nn.Sequential | nn.ModuleList) and has_forward(container):
        return LayeredModel(layers, container, names[id(container)])
    root_name = _innermost(model, [path for layer in layers for path in layer.paths])
    root = model.get_submodule(root_name)
    _check_complete(layers, root, root_name)
    return LayeredModel(layers, root, root_name)


def _container(model: nn.Module, path: str) -> nn.Sequential | nn.ModuleList:
    try:
        found = model.get_submodule(path)
    except AttributeError as error:
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.Sequential | nn.ModuleList)]
        known = f"; of what it has, these hold layers: {', '.join(filter(None, lists[:_SHOWN]))}" if lists else ""
        raise ConfigError(
            f"parallel.pipeline.layers={path}: {type(model).__name__} has no such module{known}"
        ) from error
    if not isinstance(found, nn.Sequential | nn.ModuleList):
        raise ConfigError(
            f"parallel.pipeline.layers={path} is a {type(found).__name__}, and must be an nn.Sequential or "
            "nn.ModuleList whose children are the layers"
        )
    return found


def _names(model: nn.Module) -> dict[int, str]:
    """Path of each module, parameter and buffer."""
    found: dict[int, str] = {}
    for name, part in (*model.named_parameters(), *model.named_buffers(), *model.named_modules()):
        found[id(part)] = name
    return found


def _layer(model: nn.Module, item: Any, names: dict[int, str]) -> Layer:
    owner = type(model).__name__
    if isinstance(item, nn.Module):
        item = PipelineLayer(item, item)
    if not isinstance(item, PipelineLayer):
        raise ConfigError(
            f"{owner}.pipeline_layers gave {item!r}: each layer must be a module, or PipelineLayer(function, *modules)"
        )
    for part in item.parts:
        if id(part) not in names:
            kind = "parameter or buffer" if isinstance(part, Tensor) else "module"
            raise ConfigError(
                f"{owner}.pipeline_layers gave a {type(part).__name__} that is no {kind} of it; layers must be "
                "modules that it holds"
            )
    paths = tuple(names[id(part)] for part in item.parts)
    named = ", ".join(paths[:_SHOWN]) or getattr(item.function, "__name__", repr(item.function))
    modules = [part for part in item.parts if isinstance(part, nn.Module)]
    bare = [part for part in item.parts if isinstance(part, Tensor)]
    return Layer(named, item.function, (*modules, *([BareTensors(bare)] if bare else [])), paths)


def _check_once(layers: Sequence[Layer]) -> None:
    """Refuse a module in two layers: they may come to sit on two ranks, which would train two of it."""
    if not layers:
        raise ConfigError("pipeline_layers gave no layers")
    seen: dict[int, str] = {}
    for layer in layers:
        inside = {id(inner) for module in layer.modules for inner in module.modules() if _holds_tensors(inner)}
        for key in inside:
            if key in seen:
                raise ConfigError(
                    f"the pipeline layers {seen[key]} and {layer.name} hold the same module; each must be in one layer "
                    "(they may share parameters: tied weights stay tied)"
                )
        seen.update(dict.fromkeys(inside, layer.name))
    for layer in layers:
        bare = {p for module in layer.modules if isinstance(module, BareTensors) for p in module.parameters()}
        for other in layers:
            if other is not layer and not bare.isdisjoint(p for m in other.modules for p in m.parameters()):
                raise ConfigError(
                    f"the pipeline layers {layer.name} and {other.name} use the same parameter, which one of them "
                    "names by itself; let a module hold it, and name that"
                )


def _check_complete(layers: Sequence[Layer], root: nn.Module, root_name: str) -> None:
    """Refuse layers that are not the whole forward; the LightningModule itself may hold what its steps use."""
    if not root_name:
        return
    inside = {parameter for layer in layers for module in layer.modules for parameter in module.parameters()}
    missing = [name for name, parameter in root.named_parameters() if parameter not in inside]
    if missing:
        raise ConfigError(
            f"the pipeline layers make up self.{root_name}, and {root_name}.{missing[0]} is in none of them; name "
            "every part that its forward uses, as PipelineLayer(function, *parts) where it is no layer of its own. "
            "What only the loss uses must be held outside of it"
        )


def _holds_tensors(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return bool(own) and not isinstance(module, BareTensors)


def _innermost(model: nn.Module, paths: Sequence[str]) -> str:
    """The path of the innermost module that holds them all and can be called: a ModuleList cannot."""
    split = [path.split(".")[:-1] for path in paths]
    common: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    above = [".".join(common[:end]) for end in range(len(common), -1, -1)]
    return next((path for path in above if has_forward(model.get_submodule(path))), above[0])
