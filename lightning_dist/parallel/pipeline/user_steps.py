"""The user's own steps on the rank of the last stage: they call the model and get what the pipeline gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.errors import ConfigError
from lightning_dist.parallel.batches import tensors_of
from lightning_dist.parallel.pipeline.layers import LayeredModel
from lightning_dist.parallel.pipeline.micro_batches import signature_of


def pipeline_input(module: nn.Module, batch: Any) -> tuple[Any, ...]:
    """What the first layer is called with: the module's ``pipeline_input(batch)``, else the batch, or its first item.

    Raises:
        ConfigError: The batch is neither a tensor nor begins with one, and the module does not say.
    """
    own = getattr(module, "pipeline_input", None)
    if own is not None:
        values = own(batch)
    else:
        values = batch[0] if isinstance(batch, list | tuple) and batch else batch
        if not isinstance(values, Tensor):
            raise ConfigError(
                f"a batch is a {type(batch).__name__} that does not begin with a tensor, so what the first layer takes "
                f"is not known: give {type(module).__name__} a method pipeline_input(self, batch) that returns it"
            )
    return tuple(values) if isinstance(values, list | tuple) else (values,)


class GivenOutput:
    """Has a model's forward return what the pipeline gave, instead of running.

    Args:
        model: Its root is what the user's steps call.
        owner: Name of the user's module, for messages.
    """

    def __init__(self, model: LayeredModel, owner: str) -> None:
        self._root = model.root
        self._name = f"self.{model.root_name}" if model.root_name else "self"
        self._owner = owner
        self._is_checked = False

    @contextmanager
    def for_step(self, step: str, output: Any, inputs: tuple[Any, ...]) -> Iterator[None]:
        """Around one step.

        Args:
            step: Its name.
            output: Of the last stage.
            inputs: What the first stage was called with, to compare once with what the step calls the model with.

        Raises:
            ConfigError: The step calls the model twice, not at all, or with something else.
        """
        calls = 0

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise ConfigError(
                    f"{self._owner}.{step} calls {self._name} more than once; a pipeline runs it once a micro-batch"
                )
            self._compare(step, (*args, *kwargs.values()), inputs)
            return output

        with replaced(self._root, "forward", forward):
            yield
        if not calls:
            raise ConfigError(
                f"{self._owner}.{step} does not call {self._name}, whose layers are the pipeline's; it must, once"
            )

    def _compare(self, step: str, given: tuple[Any, ...], inputs: tuple[Any, ...]) -> None:
        if self._is_checked:
            return
        self._is_checked = True
        pairs = zip(tensors_of(list(given)), tensors_of(list(inputs)), strict=False)
        if signature_of(list(given)) != signature_of(list(inputs)) or not all(_equal(a, b) for a, b in pairs):
            raise ConfigError(
                f"{self._owner}.{step} calls {self._name} with other values than the pipeline's first stage was given; "
                f"give {self._owner} a method pipeline_input(self, batch) that makes of a batch what the model is "
                "called with, and use it in the step"
            )


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether they are the same; not a number, as a missing value, equals itself."""
    return bool(((one == other) | ((one != one) & (other != other))).all())  # != itself: NaN


@dataclass
class Logged:
    """One ``self.log`` of a step, with the values of all its micro-batches.

    Attributes:
        value: Combined; a :class:`MetricPath` for a metric object.
        arguments: Further positional arguments.
        options: Keyword arguments.
    """

    value: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class MetricPath:
    """Where a module holds a metric object that was logged."""

    path: str


@dataclass
class StepLogs:
    """Collects what a step logs, micro-batch by micro-batch.

    Args:
        module: The user's.
    """

    module: nn.Module
    entries: dict[str, list[tuple[float, int, Logged]]] = field(default_factory=dict)

    @contextmanager
    def collecting(self, weight: float, samples: int) -> Iterator[None]:
        """Around one step: ``self.log`` writes here.

        Args:
            weight: How much a mean of this micro-batch counts.
            samples: In it.
        """

        def log(name: str, value: Any, *arguments: Any, **options: Any) -> None:
            if isinstance(value, Mapping):
                for key, item in value.items():
                    log(f"{name}.{key}" if name else str(key), item, *arguments, **options)
                return
            entry = Logged(self._plain(name, value), arguments, options)
            self.entries.setdefault(name, []).append((weight, options.get("batch_size") or samples, entry))

        with replaced(self.module, "log", log):
            yield

    def combined(self) -> dict[str, Logged]:
        """One entry a name."""
        return {name: _combine(entries) for name, entries in self.entries.items()}

    def _plain(self, name: str, value: Any) -> Any:
        if isinstance(value, nn.Module):
            for path, inner in self.module.named_modules():
                if inner is value:
                    return MetricPath(path)
            raise ConfigError(f"self.log({name!r}, ...): the metric is no attribute of {type(self.module).__name__}")
        return torch.as_tensor(value).detach().cpu()


@contextmanager
def no_logs(module: nn.Module) -> Iterator[None]:
    """Around layers, which run on one rank each, and may not log what the others then lack.

    Raises:
        ConfigError: One does.
    """

    def log(name: str, *_: Any, **__: Any) -> None:
        raise ConfigError(
            f"self.log({name!r}, ...) in a layer of a pipeline, which runs on one rank and once a micro-batch: let the "
            "model return the value, and log it in the step"
        )

    with replaced(module, "log", log):
        yield


@contextmanager
def no_gathers(module: nn.Module, step: str) -> Iterator[None]:
    """Around one step, which runs on the rank of the last stage: others do not answer when it gathers from all.

    Args:
        module: The user's.
        step: Its name.

    Raises:
        ConfigError: It does.
    """
    own: Callable[..., Any] = module.all_gather  # type: ignore[assignment]  # a LightningModule's

    def all_gather(data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        if group is None:
            raise ConfigError(
                f"self.all_gather in {type(module).__name__}.{step}, which runs on the rank of a pipeline's last stage "
                "only: return the values, in training_step beside the loss as a mapping, and gather them in "
                f"on_{step.removesuffix('_step').replace('training', 'train')}_batch_end, which runs on all ranks"
            )
        return own(data, group=group, sync_grads=sync_grads)

    with replaced(module, "all_gather", all_gather):
        yield


@contextmanager
def replaced(module: nn.Module, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """While it is open, a module has another method of this name."""
    before = vars(module).get(name)
    vars(module)[name] = method
    try:
        yield
    finally:
        if before is None:
            del vars(module)[name]
        else:
            vars(module)[name] = before


def replay(module: nn.Module, logs: Mapping[str, Logged]) -> None:
    """Log on this rank what the step logged on the last stage's."""
    log: Callable[..., None] = module.log  # type: ignore[assignment]  # a LightningModule's
    for name, entry in logs.items():
        value = module.get_submodule(entry.value.path) if isinstance(entry.value, MetricPath) else entry.value
        log(name, value, *entry.arguments, **entry.options)


def _combine(entries: list[tuple[float, int, Logged]]) -> Logged:
    first = entries[0][2]
    options = {**first.options, "batch_size": sum(samples for _, samples, _ in entries)}
    if isinstance(first.value, MetricPath):
        return Logged(first.value, first.arguments, first.options)
    values = torch.stack([entry.value for _, _, entry in entries])
    how = first.options.get("reduce_fx", "mean")
    if how in ("mean", torch.mean):
        weights = torch.tensor([weight for weight, _, _ in entries], dtype=torch.float64)
        counted = torch.where(weights > 0, values.double(), 0)  # the mean of nothing is NaN
        value = (counted * weights).sum() / weights.sum() if weights.sum() else values.double().mean()
        value = value.to(values.dtype if values.is_floating_point() else torch.float32)
    elif how in ("sum", torch.sum):
        value = values.sum()
    elif how in ("max", torch.max):
        value = values.max()
    elif how in ("min", torch.min):
        value = values.min()
    else:
        value = how(values)  # the user's own
    return Logged(value, first.arguments, options)
