"""A model whose layers are split over a group: splitting it, running it, its whole tensors, undoing it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from lightning_dist.errors import CombinationError, ConfigError
from lightning_dist.parallel.boxes import Spread, boxes_along, whole_box
from lightning_dist.parallel.lost_weights import LostWeights
from lightning_dist.parallel.tensor.anomaly import anomalies_found_in_parts
from lightning_dist.parallel.tensor.layers import PerHead, SplitLayer, as_placed, guarded, placements_of
from lightning_dist.parallel.tensor.logits import SplitLogits
from lightning_dist.parallel.tensor.plan import Split, split_model
from lightning_dist.parallel.tensor.region import SplitRegion, make_stream
from lightning_dist.parallel.tensor.rows import rank_ranges, to_part_order, to_rank_order
from lightning_dist.parallel.tensor.styles import Style
from lightning_dist.parallel.tensor.survey import survey


@dataclass
class SplitParameter:
    """A parameter that was replaced by its part.

    Attributes:
        original: The parameter as the user made it; empty while the model is split.
        shape: Of the whole.
        placement: How it is spread over the group.
        fused: Projections fused in it, whose rows are kept in the order of :mod:`.rows`; 1 if it is one.
        places: The modules that hold it, several if it is tied, its name there, and its dotted name.
    """

    original: nn.Parameter
    shape: torch.Size
    placement: Placement
    fused: int
    places: list[tuple[nn.Module, str, str]]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: str | Mapping[str, str] = "auto",
    loss_parallel: bool = False,
) -> TensorParallel:
    """Split the layers of a model over a group; every rank of the group calls it.

    Values are those of the group's first rank, for the whole layers too. Before anything is changed the plan is checked
    in full. Optimizers must be made afterwards, and ``fully_shard`` must come afterwards.

    Args:
        model: On its device, in fp32 or whatever it is to be trained in; not yet wrapped or sharded.
        mesh: 1-D, this rank's tensor-parallel group; for FSDP2 afterwards, a slice of the mesh that holds the data axes
            too (see :func:`~lightning_dist.parallel.tensor.mesh.make_mesh`).
        plan: ``auto``, the name of a ready plan, or pattern -> style; see ``docs/tensor.md``.
        loss_parallel: Keep logits split over the vocabulary inside :meth:`TensorParallel.running`.

    Raises:
        ConfigError: The plan does not fit the model, the size or the mesh.
    """
    if mesh.ndim != 1:
        raise ConfigError(f"tensor parallelism takes a mesh of one axis, got {mesh}; slice it: mesh['tp']")
    split = split_model(survey(model), size=mesh.size(), plan=plan)
    if loss_parallel and not split.has_head:
        raise CombinationError(
            f"loss_parallel keeps the logits of a head layer split, and plan {split.plan} has none; write head for the "
            "output layer, or turn loss_parallel off"
        )
    stream = make_stream(mesh.device_type, mesh.get_local_rank())
    return TensorParallel(model, mesh, split, SplitRegion(stream), loss_parallel=loss_parallel)


class TensorParallel:
    """A split model. Made by :func:`parallelize`.

    Args:
        model: Whose layers are split, in place.
        mesh: 1-D, the group.
        split: What happens to each module.
        region: Where activations are split.
        loss_parallel: Keep logits split over the vocabulary inside :meth:`running`.

    Attributes:
        model: The model.
        mesh: The group.
        split: What happens to each module.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, split: Split, region: SplitRegion, *, loss_parallel: bool
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.split = split
        self._region = region
        self._loss_parallel = loss_parallel
        self._logits = SplitLogits()
        self._entries: dict[tuple[int, str], SplitParameter] = {}  # by id of the module, and name in it
        self._handles: list[RemovableHandle] = []
        self._head_counts: list[tuple[nn.Module, str, int]] = []
        with torch.no_grad():
            self._split_parameters()
            self._share_the_rest()
        self._hook_layers()
        self._divide_heads()
        self.share_random_state()

    @property
    def entries(self) -> tuple[SplitParameter, ...]:
        """The parameters that are split, each once."""
        return tuple({id(entry): entry for entry in self._entries.values()}.values())

    def entry_at(self, module: nn.Module, name: str) -> SplitParameter | None:
        """The parameter that a module holds under a name; ``None`` if it is not split."""
        return self._entries.get((id(module), name))

    # -- running ------------------------------------------------------------------------------------------------------

    @contextmanager
    def running(self, *, keeps_logits: bool = True) -> Iterator[None]:
        """Around each step, and around each backward; may be entered inside itself.

        Args:
            keeps_logits: Under ``loss_parallel``, leave logits split inside; else they are gathered.

        Raises:
            ConfigError: The output of a column layer was taken by no row layer.
        """
        with ExitStack() as stack:
            stack.enter_context(anomalies_found_in_parts())
            if self._loss_parallel and keeps_logits:
                stack.enter_context(self._logits.kept())
            try:
                yield
            except BaseException:
                self._region.leave()
                raise
        opened_by = self._region.leave()
        if opened_by is not None:
            raise ConfigError(
                f"the output of {opened_by} is split over ranks, and no row layer took it; write row in the plan for "
                "the layer that comes after it"
            )

    def leave_region(self) -> str | None:
        """Where a part of the model begins or ends: the column layer whose output no row layer has taken, if any."""
        return self._region.leave()

    def share_random_state(self) -> None:
        """Give all ranks of the group the default generators of its first; collective.

        Dropout on whole activations is right only as long as these stay alike: what draws from them (augmentation, a
        sampler) must do so alike on all ranks of a group.
        """
        self._region.leave()
        torch.set_rng_state(self._from_first(torch.get_rng_state()).cpu())
        if self.mesh.device_type == "cuda":
            torch.cuda.set_rng_state(self._from_first(torch.cuda.get_rng_state()).cpu())

    # -- whole tensors ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def whole(self, entry: SplitParameter, part: Tensor) -> Tensor:
        """The whole of a parameter, its gradient or its optimizer state, as of one process; collective.

        Args:
            entry: The parameter.
            part: This rank's part of it, or of a tensor of its shape.
        """
        whole = self.placed(entry, part.detach()).full_tensor()
        return self.in_own_order(entry, whole) if entry.fused > 1 else whole

    @torch.no_grad()
    def part(self, entry: SplitParameter, whole: Tensor) -> Tensor:
        """The reverse of :meth:`whole`: this rank's part; nothing is sent."""
        if entry.fused > 1:
            whole = to_rank_order(whole, parts=entry.fused, size=self.mesh.size())
        placement = entry.placement
        if not isinstance(placement, Shard):
            return whole
        return whole.chunk(self.mesh.size(), placement.dim)[self.mesh.get_local_rank()].contiguous()

    def spread_of(self, entry: SplitParameter) -> Spread:
        """Which values of the whole this rank's part has."""
        if not isinstance(entry.placement, Shard):
            return Spread(tuple(entry.shape), (whole_box(entry.shape),), frozenset())
        return self.spread_along(entry, entry.shape, entry.placement.dim)

    def spread_along(self, entry: SplitParameter, shape: torch.Size, dim: int) -> Spread:
        """Which values this rank has of a tensor that belongs to a parameter and is split along a dim.

        Args:
            entry: The parameter.
            shape: Of the whole tensor.
            dim: Of the tensor.
        """
        ranges = rank_ranges(shape[dim], parts=entry.fused, size=self.mesh.size(), rank=self.mesh.get_local_rank())
        return Spread(tuple(shape), boxes_along(shape, dim, ranges), frozenset({"tp"}))

    def in_own_order(self, entry: SplitParameter, whole: Tensor) -> Tensor:
        """A whole tensor whose rows are in the order of the ranks, as of one process; see :mod:`.rows`."""
        return to_part_order(whole, parts=entry.fused, size=self.mesh.size())

    def spread(self, entry: SplitParameter, whole: Tensor) -> DTensor:
        """A whole tensor that belongs to a parameter but is not of its shape; nothing is sent.

        It is split as the parameter is where it is as long along that dim, else whole on each rank.
        """
        placement, dim = entry.placement, entry.placement.dim if isinstance(entry.placement, Shard) else 0
        if not isinstance(placement, Shard) or dim >= whole.dim() or whole.shape[dim] != entry.shape[dim]:
            return DTensor.from_local(whole, self.mesh, [Replicate()], run_check=False)
        return self.placed(entry, self.part(entry, whole))

    def placed(self, entry: SplitParameter, part: Tensor) -> DTensor:
        """This rank's part as the DTensor it is a part of."""
        return DTensor.from_local(part, self.mesh, [entry.placement], run_check=False)

    # -- undoing ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def release(self) -> None:
        """Make the model whole again: the user's parameter objects, with the present values; collective. Safe twice.

        Call it while the parameters are on the mesh's device, and after FSDP2's shards have been given up.
        """
        for entry in self.entries:
            current = self._current(entry)
            entry.original.data = self.whole(entry, current.to_local())
            self._put(entry, entry.original, requires_grad=current.requires_grad)
        self._unhook()

    @torch.no_grad()
    def abandon(self) -> None:
        """After a failure: the parts are lost, and their modules say so; nothing is sent. Safe twice."""
        lost: dict[nn.Module, dict[str, torch.Size]] = {}
        for entry in self.entries:
            module, own, _ = entry.places[0]
            current = module._parameters[own]
            if not isinstance(current, DTensor):  # lost with the shards that FSDP2 had made of it
                continue
            entry.original.data = entry.original.data.new_empty(0)
            self._put(entry, entry.original, requires_grad=current.requires_grad)
            for module, own, _ in entry.places:
                lost.setdefault(module, {})[own] = entry.shape
        self._unhook()
        for module, sizes in lost.items():
            LostWeights(module, sizes)

    def _current(self, entry: SplitParameter) -> DTensor:
        module, own, _ = entry.places[0]
        current = module._parameters[own]
        assert isinstance(current, DTensor)
        return current

    def _put(self, entry: SplitParameter, parameter: nn.Parameter, *, requires_grad: bool) -> None:
        parameter.requires_grad_(requires_grad)
        for module, own, _ in entry.places:
            module.register_parameter(own, parameter)

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        for module, attribute, number in self._head_counts:
            setattr(module, attribute, number)
        self._region.leave()
        self._entries, self._handles, self._head_counts = {}, [], []

    # -- splitting ----------------------------------------------------------------------------------------------------

    def _split_parameters(self) -> None:
        """Replace parameters by their parts; tied ones stay one object."""
        replaced: dict[int, SplitParameter] = {}
        styles = {**self.split.layers, **dict.fromkeys(self.split.per_head, Style("per_head"))}
        for path, style in styles.items():
            module = self.model.get_submodule(path)
            for own, placement in placements_of(module, style).items():
                original = module._parameters[own]
                assert original is not None
                entry = SplitParameter(original, original.shape, placement, style.parts, [])
                entry = self._entries[id(module), own] = replaced.setdefault(id(original), entry)
                entry.places.append((module, own, f"{path}.{own}" if path else own))
        for entry in replaced.values():
            self._replace(entry)

    def _replace(self, entry: SplitParameter) -> None:
        original = entry.original
        whole = original.detach()
        if entry.fused > 1:
            whole = to_rank_order(whole, parts=entry.fused, size=self.mesh.size())
        part = nn.Parameter(distribute_tensor(whole, self.mesh, [entry.placement]))
        part.register_hook(partial(as_placed, (entry.placement,)))
        part.requires_grad_(original.requires_grad)
        vars(part).update(vars(original))  # what the user noted on it, e.g. for weight decay
        for module, own, _ in entry.places:
            module.register_parameter(own, part)
        original.grad = None
        original.data = original.new_empty(0)

    def _share_the_rest(self) -> None:
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if not isinstance(tensor, DTensor):
                tensor.copy_(self._from_first(tensor.detach()))

    def _from_first(self, tensor: Tensor) -> Tensor:
        """The tensor of the group's first rank."""
        sent = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        received = distribute_tensor(sent, self.mesh, [Replicate()]).to_local()
        return torch.view_as_complex(received) if tensor.is_complex() else received

    def _hook_layers(self) -> None:
        modules = dict(self.model.named_modules())
        known = frozenset(self.split.layers) | self.split.per_head | self.split.replicated
        self._handles += guarded(modules, known, self._region)
        for path, style in self.split.layers.items():
            layer = SplitLayer(path, style, self._region, self._logits)
            parallelize_module(modules[path], self.mesh, layer)
            self._handles += layer.handles
        for path in self.split.per_head:
            per_head = PerHead()
            parallelize_module(modules[path], self.mesh, per_head)
            self._handles += per_head.handles

    def _divide_heads(self) -> None:
        for path, attributes in self.split.heads.items():
            module = self.model.get_submodule(path)
            for attribute, number in attributes.items():
                self._head_counts.append((module, attribute, getattr(module, attribute)))
                setattr(module, attribute, number)
