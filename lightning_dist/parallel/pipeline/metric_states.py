"""Metric objects of torchmetrics: a step counts on the rank of the last stage, and all ranks of the pipeline know it.

Note [One count a pipeline]
    What a step has changed in a metric is told to the other ranks of the pipeline, with what it has logged. So a metric
    holds the same on each of them, and hooks, which run on all, go on with it. What it computes over ranks is computed
    over those that hold the same stages, which counts each pipeline once.

Note [The value of a batch]
    A metric's ``forward`` gives the value of what it was called with, here a micro-batch. Beside each metric that a
    step calls, a twin counts the batch; its value is what ``self.log`` shows for the step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_dist.parallel.pipeline.micro_batches import map_tensors
from lightning_dist.parallel.pipeline.user_steps import replaced


@dataclass(frozen=True)
class MetricNews:
    """What a step has changed in a metric; all in CPU memory.

    Attributes:
        updates: How often it has been updated since it was reset.
        batch_value: Of the batch; ``None`` if the step did not call the metric, but its ``update``.
        tensors: Its states that are tensors.
        lists: Its states that are lists: how many items stay, and those that follow.
    """

    updates: int
    batch_value: Any
    tensors: dict[str, Tensor]
    lists: dict[str, tuple[int, list[Tensor]]]


@dataclass(frozen=True)
class _Before:
    updates: int
    lists: dict[str, tuple[int, Tensor | None]]  # length, and the last item


class MetricStates:
    """The metrics of a module, on one rank of a pipeline, until :meth:`release`.

    On the rank of the last stage: :meth:`begin`, then :meth:`counting` around each call of the user's step, then
    :meth:`news`; on the others :meth:`learn`.

    Args:
        module: The user's.
        group: The ranks that hold the same stages.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._module = module
        self._group = group
        self._metrics: dict[str, Metric] = {}
        self._collections: list[MetricCollection] = []
        self._joined: list[Metric] = []
        self._twins: dict[str, Metric] = {}
        self._counted: set[str] = set()
        self._before: dict[str, _Before] = {}

    def find(self) -> None:
        """Look for metrics; some may be new."""
        found = dict(self._module.named_modules())
        self._metrics = {path: each for path, each in found.items() if isinstance(each, Metric)}
        self._collections = [each for each in found.values() if isinstance(each, MetricCollection)]
        for metric in self._metrics.values():
            if metric.process_group is None and self._group is not None:
                metric.process_group = self._group
                self._joined.append(metric)

    def release(self) -> None:
        """Let metrics compute over all ranks again. Safe to call twice."""
        for metric in self._joined:
            metric.process_group = None
        self._joined, self._twins = [], {}

    # -- on the rank of the last stage ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """A batch comes."""
        self._counted = set()
        self._before = {path: _state_before(metric) for path, metric in self._metrics.items()}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Around the step of a micro-batch; see Note [The value of a batch]."""
        with ExitStack() as stack:
            for path, metric in self._metrics.items():
                stack.enter_context(replaced(metric, "forward", self._counted_forward(path, metric)))
            yield

    def news(self) -> dict[str, MetricNews]:
        """Path -> what the batch has changed in a metric."""
        for collection in self._collections:
            collection.values(copy_state=False)  # those that share a state with another get it
        found = {}
        for path, metric in self._metrics.items():
            before = self._before[path]
            if path in self._counted:
                metric._forward_cache = self._twins[path].compute()
            elif metric.update_count == before.updates:
                continue
            state = metric.metric_state
            found[path] = MetricNews(
                metric.update_count,
                map_tensors(metric._forward_cache, _to_cpu),
                {name: _to_cpu(value) for name, value in state.items() if isinstance(value, Tensor)},
                {
                    name: _more(value, before.lists.get(name))
                    for name, value in state.items()
                    if isinstance(value, list)
                },
            )
        return found

    def _counted_forward(self, path: str, metric: Metric) -> Callable[..., Any]:
        own = metric.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            value = own(*args, **kwargs)
            if path not in self._twins:
                self._twins[path] = _twin_of(metric)
            if path not in self._counted:
                self._twins[path].reset()
                self._counted.add(path)
            self._twins[path].update(*args, **kwargs)
            return value

        return forward

    # -- on the others -------------------------------------------------------------------------------------------------

    def learn(self, news: Mapping[str, MetricNews]) -> None:
        """Take over what the rank of the last stage has counted."""
        for path, said in news.items():
            metric = self._metrics[path]

            def move(tensor: Tensor, device: torch.device = metric.device) -> Tensor:
                return tensor.to(device)

            for name, value in said.tensors.items():
                setattr(metric, name, move(value))
            for name, (kept, more) in said.lists.items():
                items = more if metric.compute_on_cpu else [move(item) for item in more]
                setattr(metric, name, [*getattr(metric, name)[:kept], *items])
            metric._update_count = said.updates
            metric._forward_cache = map_tensors(said.batch_value, move)
            metric._computed = None


def _state_before(metric: Metric) -> _Before:
    lists = {name: value for name, value in metric.metric_state.items() if isinstance(value, list)}
    return _Before(metric.update_count, {n: (len(items), items[-1] if items else None) for n, items in lists.items()})


def _more(items: list[Tensor], before: tuple[int, Tensor | None] | None) -> tuple[int, list[Tensor]]:
    """How many items are those from before the batch, none if it was reset; and the others."""
    kept, last = before if before is not None else (0, None)
    if last is not None and (len(items) < kept or not torch.equal(items[kept - 1], last)):
        kept = 0
    return kept, [_to_cpu(item) for item in items[kept:]]


def _twin_of(metric: Metric) -> Metric:
    """One that counts for itself, and over ranks only if a metric's ``forward`` does."""
    instead: dict[int, Any] = {}  # id of what is not to be copied -> what the twin has
    for inner in metric.modules():
        instead |= {id(hooks): type(hooks)() for name, hooks in vars(inner).items() if name.endswith("_hooks")}
        if isinstance(inner, Metric):
            instead[id(inner.process_group)] = inner.process_group
    twin = copy.deepcopy(metric, instead)
    for inner in twin.modules():
        vars(inner).pop("forward", None)
        if isinstance(inner, Metric):
            inner.sync_on_compute = inner._to_sync = inner.dist_sync_on_step
    return twin


def _to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()
