"""A model cut into stages on this rank: what it holds, what runs its batches, and how it becomes whole again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_dist.comm.collectives import RankGroup
from lightning_dist.config.pipeline import PipelineConfig, stages_of_position
from lightning_dist.errors import CollectiveError
from lightning_dist.events import EventStream
from lightning_dist.parallel.lost_weights import LostWeights
from lightning_dist.parallel.pipeline.absent import AbsentTensors
from lightning_dist.parallel.pipeline.cut import Cut
from lightning_dist.parallel.pipeline.links import StageLinks
from lightning_dist.parallel.pipeline.parts import StageEnds, part_of
from lightning_dist.parallel.pipeline.runner import StageRunner
from lightning_dist.parallel.pipeline.shared import LocalAliases, SharedParameters
from lightning_dist.parallel.pipeline.stage import Failed, LayerStage, StageModule
from lightning_dist.parallel.pipeline.stage_state import StageStateHooks, fill_in
from lightning_dist.parallel.pipeline.whole import StageGather
from lightning_dist.parallel.tensor import TensorParallel, keep_list_options
from lightning_dist.parallel.tensor.part_tensors import PartTensors


class StagedModel:
    """Takes away what other ranks hold, until :meth:`release`; every rank makes it.

    Args:
        module: The user's; whole, with the same values on every rank.
        cut: Who holds what.
        links: Its groups.
        shared_groups: Of each set of ranks that hold parameters together, this one among them: their group.
        config: Options.
        events: Where work is recorded.
        device: Where it runs.
        failed: Told of errors of layers.
        split: What has split the layers over ranks; ``None`` where they are whole.
    """

    def __init__(
        self,
        module: nn.Module,
        cut: Cut,
        links: StageLinks,
        *,
        shared_groups: dict[tuple[int, ...], RankGroup],
        config: PipelineConfig,
        events: EventStream,
        device: torch.device,
        failed: Failed,
        split: TensorParallel | None = None,
    ) -> None:
        self.module = module
        self.split = split
        self._links = links
        self._tell = failed
        self.full = None if split is None else PartTensors(split, links.among_sharers)
        self.cut = cut
        position = links.pipeline.index
        self._position = position
        self.own = tuple(tensor for tensor in cut.tensors if position in cut.holders(tensor))
        held = set(self.own)
        self._absent = AbsentTensors(tensor for tensor in cut.tensors if tensor not in held)
        beside = cut.beside(module)
        last = len(cut.counts) - 1
        where = links.collectives.where(links.collectives.rank)
        elsewhere = {id(p): name for name, p in module.named_parameters() if p in self._absent}
        self.stages = tuple(
            LayerStage(
                StageModule(cut.layers_of(index), beside if index == last else ()),
                index=index,
                num_stages=len(cut.counts),
                positions=cut.positions,
                channels=links.channels,
                events=events,
                device=device,
                failed=self._failed,
                where=where,
                elsewhere=elsewhere,
            )
            for index in stages_of_position(cut.positions, position)
        )
        self.runner = StageRunner(self.stages, config, links.pipeline, links.collectives)
        self.gather = StageGather(links.pipeline, links.collectives, device)
        self._shared_groups = shared_groups
        self._collectives = links.collectives
        self.shared = self._share()
        aliased = cut.aliased(position)
        self.aliases = LocalAliases(aliased)
        self._aliased = {parameter for parameter, _ in aliased}
        self.hooks = StageStateHooks(module, cut, self._absent, self.gather, self.full)
        if split is not None:
            StageEnds([(str(stage), stage.submod, stage.is_last) for stage in self.stages], split)

    def _share(self) -> SharedParameters:
        shared = self.cut.shared()
        groups = [(shared[holders], group) for holders, group in self._shared_groups.items()]
        return SharedParameters(groups, self._collectives)

    def follow(self, replaced: Mapping[Tensor, Tensor], *, shown: Mapping[Tensor, Tensor] | None = None) -> None:
        """Some parameters of this rank have been replaced by others: by their shards, or those by whole ones.

        The hooks by which a ``state_dict`` becomes whole run after those that are there now.

        Args:
            replaced: Old -> new.
            shown: Old -> another one that the model has in its place at times.
        """
        self.cut = self.cut.with_tensors(replaced, shown or {})
        self.own = tuple(replaced.get(tensor, tensor) for tensor in self.own)
        self.shared = self._share()
        self.hooks.release()
        self.hooks = StageStateHooks(self.module, self.cut, self._absent, self.gather, self.full)

    @property
    def absent(self) -> frozenset[nn.Parameter]:
        """Parameters that other ranks hold, and this one does not."""
        return frozenset(p for p in self.module.parameters() if p in self._absent)

    def parameters_of(self, stage: LayerStage) -> dict[str, nn.Parameter]:
        """Name -> parameter, whose gradients are complete when a stage has its last one."""
        own = set(stage.submod.parameters()) - self._aliased
        return {name: p for name, p in self.module.named_parameters() if p in own and p not in self._absent}

    @property
    def late_parameters(self) -> dict[str, nn.Parameter]:
        """Name -> parameter, whose gradients are complete when the whole batch is done."""
        return {name: p for name, p in self.module.named_parameters() if p in self._aliased}

    @property
    def buffers_module(self) -> nn.Module:
        """The buffers of this rank's stages, as a module."""
        return nn.ModuleList(stage.submod for stage in self.stages)

    def counts(self, tensor: Tensor) -> bool:
        """Whether this rank speaks for a parameter, its gradient and its state: of several that hold it, one does."""
        return self.cut.owner(tensor) == self._position

    def is_here(self, tensor: Tensor) -> bool:
        """Whether this rank holds it."""
        return tensor not in self._absent

    @contextmanager
    def running(self, *, keeps_logits: bool = True) -> Iterator[None]:
        """Around the forwards and backwards of a batch; see :meth:`TensorParallel.running`."""
        if self.split is None:
            yield
            return
        try:
            with self.split.running(keeps_logits=keeps_logits):
                yield
        except CollectiveError:
            raise
        except Exception as error:
            self._links.raise_if_between_sharers(error, "a batch of a pipeline")
            raise

    def _failed(self, error: Exception, said: str) -> None:
        self._links.raise_if_between_sharers(error, said)
        self._tell(error, said)

    def optimizer_state(self, optimizer: torch.optim.Optimizer, *, keep: bool) -> dict[str, Any]:
        """An optimizer's ``state_dict()`` with the whole entries of all stages; collective.

        Args:
            optimizer: Of parameters of this model.
            keep: Whether this rank wants the values.
        """
        owners = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))

        def whole(index: int, value: Tensor) -> Tensor:
            if self.full is None or not isinstance(value, DTensor):
                return value
            return self.full.whole_entry(owners[index], value, keep=True)

        return self.gather.optimizer_state(optimizer.state_dict(), keep=keep, whole=whole)

    def optimizer_state_to_load(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """Of the state of all parameters what this rank holds."""
        owners = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
        kept = {**state, "state": {i: entries for i, entries in state["state"].items() if self.is_here(owners[i])}}
        if self.full is None:
            return kept
        return keep_list_options(optimizer, self.full.cut_optimizer_state(optimizer, kept))

    def release(self, *, whole: bool) -> None:
        """Undo the cut; collective over the pipeline if ``whole``.

        Args:
            whole: Bring what other ranks hold; else it is lost, and the module says so.
        """
        self.hooks.release()
        if whole:
            fill_in(self.cut, self._absent, self.gather)
            if self.split is not None:
                self.split.release()
        else:
            self._lose()
            if self.split is not None:
                self.split.abandon()

    def _lose(self) -> None:
        for module in self.module.modules():
            sizes = {}
            for name, parameter in module.named_parameters(recurse=False):
                if parameter in self._absent:
                    sizes[name] = parameter.shape
            if sizes:
                LostWeights(module, sizes)
        for tensor in self.cut.tensors:
            if tensor in self._absent:
                part = part_of(tensor)
                part.data = torch.empty(0, dtype=part.dtype, device=part.device)


def crossings(hosts: Sequence[str], positions: Sequence[int]) -> int:
    """Boundaries between stages that lie between hosts.

    Args:
        hosts: Of each of the pipeline's ranks.
        positions: Which of them has each stage.
    """
    return sum(hosts[a] != hosts[b] for a, b in itertools.pairwise(positions))
