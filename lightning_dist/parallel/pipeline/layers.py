"""What a model says of how it can be cut: its layers in order, each a module or a function of some.

A LightningModule says it by ``pipeline_layers``: a method that returns the list, or a dotted path to a Sequential or
ModuleList, or an attribute with that path. What is in no layer (a parameter of the loss) belongs to the last stage,
where the module's own steps run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_dist.errors import ConfigError
from lightning_dist.parallel.module_tree import has_forward

_SHOWN = 6


class PipelineLayer:
    """A layer that is no module: a function, and the modules that it uses.

    Example::

        def pipeline_layers(self):
            gpt = self.model
            embed = PipelineLayer(gpt.embed, gpt.tokens, gpt.positions)
            return [embed, *gpt.blocks, PipelineLayer(gpt.logits, gpt.norm, gpt.head)]

    Args:
        function: Called with what the layer before returned; its results, tensors, are what the next is called with.
        *modules: Those whose parameters and buffers it uses.
    """

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        self.function = function
        self.modules = modules


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Attributes:
        name: Paths of its modules, for messages.
        call: Runs it.
        modules: What it uses.
    """

    name: str
    call: Callable[..., Any]
    modules: tuple[nn.Module, ...]


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
    said = list(container)
    names = {id(module): name for name, module in model.named_modules()}
    layers = tuple(_layer(model, item, names) for item in said)
    _check_once(layers)
    if isinstance(container, nn.Sequential | nn.ModuleList) and has_forward(container):
        return LayeredModel(layers, container, names[id(container)])
    root_name = _common_parent([names[id(module)] for layer in layers for module in layer.modules])
    while not has_forward(model.get_submodule(root_name)) and root_name:  # a ModuleList is not what is called
        root_name = root_name.rpartition(".")[0]
    return LayeredModel(layers, model.get_submodule(root_name), root_name)


def _container(model: nn.Module, path: str) -> nn.Sequential | nn.ModuleList:
    try:
        found = model.get_submodule(path)
    except AttributeError as error:
        raise ConfigError(f"parallel.pipeline.layers={path}: {type(model).__name__} has no such module") from error
    if not isinstance(found, nn.Sequential | nn.ModuleList):
        raise ConfigError(
            f"parallel.pipeline.layers={path} is a {type(found).__name__}, and must be an nn.Sequential or "
            "nn.ModuleList whose children are the layers"
        )
    return found


def _layer(model: nn.Module, item: Any, names: dict[int, str]) -> Layer:
    if isinstance(item, nn.Module):
        call, modules = item, (item,)
    elif isinstance(item, PipelineLayer):
        call, modules = item.function, item.modules  # type: ignore[assignment]  # a module is a function too
    else:
        raise ConfigError(
            f"{type(model).__name__}.pipeline_layers gave {item!r}: each layer must be a module, or "
            "PipelineLayer(function, *modules)"
        )
    strangers = [type(module).__name__ for module in modules if id(module) not in names]
    if strangers:
        raise ConfigError(
            f"{type(model).__name__}.pipeline_layers gave a {strangers[0]} that is no module of it; layers must be "
            "modules that it holds"
        )
    named = ", ".join(names[id(module)] for module in modules[:_SHOWN]) or getattr(call, "__name__", repr(call))
    return Layer(named, call, modules)


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


def _holds_tensors(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return bool(own)


def _common_parent(paths: Sequence[str]) -> str:
    """The path of the innermost module that holds them all."""
    if not paths:
        return ""
    split = [path.split(".")[:-1] for path in paths]
    common: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)
