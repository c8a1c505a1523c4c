"""A model whose layers are split over a group: splitting it, running it, its whole tensors, undoing it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from lightning_dist.errors import CombinationError, ConfigError
from lightning_dist.parallel.tensor.layers import PerHead, SplitLayer, as_placed, guarded, placements_of
from lightning_dist.parallel.tensor.logits import SplitLogits
from lightning_dist.parallel.tensor.plan import Split, split_model
from lightning_dist.parallel.tensor.region import SplitRegion, make_stream
from lightning_dist.parallel.tensor.rows import to_part_order, to_rank_order
from lightning_dist.parallel.tensor.styles import Style
from lightning_dist.parallel.tensor.survey import survey


@dataclass
class _Replaced:
    """A parameter that was replaced by its part.

    Attributes:
        original: The parameter as the user made it; empty while the model is split.
        places: The modules that hold it, several if it is tied, and its name there.
    """

    original: nn.Parameter
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
        fused: Parameter name -> projections fused in it, whose rows are kept in the order of :mod:`.rows`.
        tp_dims: Parameter name -> the dim that is split.
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
        self._replaced: list[_Replaced] = []
        self._handles: list[RemovableHandle] = []
        self._head_counts: list[tuple[nn.Module, str, int]] = []
        self._fused: dict[str, int] = {}
        self._tp_dims: dict[str, int] = {}
        with torch.no_grad():
            self._split_parameters()
            self._share_the_rest()
        self._hook_layers()
        self._divide_heads()
        self.share_random_state()

    @property
    def fused(self) -> Mapping[str, int]:
        """Parameter name -> projections fused in it, whose rows are in the order of the ranks."""
        return MappingProxyType(self._fused)

    @property
    def tp_dims(self) -> Mapping[str, int]:
        """Parameter name -> the dim that is split."""
        return MappingProxyType(self._tp_dims)

    # -- running ------------------------------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around each training step, and around each backward; may be entered inside itself.

        Raises:
            ConfigError: The output of a column layer was taken by no row layer.
        """
        with ExitStack() as stack:
            if self._loss_parallel:
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
    def full_tensor(self, name: str, value: Tensor) -> Tensor:
        """The whole of a parameter, its gradient or its optimizer state, as of one process; collective.

        Args:
            name: Of the parameter.
            value: A DTensor on any mesh, as sharded by tensor parallelism or FSDP2; a plain tensor comes back as it is.
        """
        if not isinstance(value, DTensor):
            return value
        full = value.full_tensor().detach()
        return to_part_order(full, parts=self._fused[name], size=self.mesh.size()) if name in self._fused else full

    @torch.no_grad()
    def local_tensor(self, name: str, full: Tensor, like: Tensor) -> Tensor:
        """The reverse of :meth:`full_tensor`; nothing is sent.

        Args:
            name: Of the parameter.
            full: The whole tensor, alike on all ranks.
            like: The parameter as it is here; its mesh, placements and device are taken.
        """
        full = full.detach().to(like.device)
        if not isinstance(like, DTensor):
            return full
        if name in self._fused:
            full = to_rank_order(full, parts=self._fused[name], size=self.mesh.size())
        return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)

    def full_state_dict(self, *, keep: bool = True) -> dict[str, Any]:
        """The model's state under its original names, whole; tied entries are one tensor; collective.

        Args:
            keep: Whether this rank wants it; others take part and get an empty dict.
        """
        gathered: dict[int, Tensor] = {}
        state: dict[str, Any] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                full: Any = value
            elif id(value) in gathered:
                full = gathered[id(value)]
            else:
                full = self.full_tensor(name, value).detach()
                gathered[id(value)] = full if keep else full.new_empty(0)
            if keep:
                state[name] = full
        return state

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load whole tensors, alike on all ranks, into the parts.

        Raises:
            ConfigError: Names are missing or unknown (if ``strict``), or a shape differs.
        """
        own = self.model.state_dict(keep_vars=True)
        missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if strict and (missing or unknown):
            raise ConfigError(f"the state does not fit the model: missing {missing}, unknown {unknown}")
        converted: dict[str, Any] = {}
        for name, value in state.items():
            target = own.get(name)
            if isinstance(target, Tensor) and isinstance(value, Tensor):
                if target.shape != value.shape:
                    raise ConfigError(f"{name} has shape {tuple(target.shape)}, got {tuple(value.shape)}")
                value = self.local_tensor(name, value, target)
            converted[name] = value
        self.model.load_state_dict(converted, strict=strict)

    # -- undoing ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def release(self) -> None:
        """Make the model whole again: the user's parameter objects, with the present values; collective. Safe twice.

        Call it while the parameters are on the mesh's device, and after FSDP2's shards have been given up; not after a
        failed collective.
        """
        for replaced in self._replaced:
            module, own, name = replaced.places[0]
            current = module._parameters[own]
            assert current is not None
            replaced.original.data = self.full_tensor(name, current).detach()
            replaced.original.requires_grad_(current.requires_grad)
            for module, own, _ in replaced.places:
                module.register_parameter(own, replaced.original)
        for handle in self._handles:
            handle.remove()
        for module, attribute, number in self._head_counts:
            setattr(module, attribute, number)
        self._region.leave()
        self._replaced, self._handles, self._head_counts = [], [], []
        self._fused, self._tp_dims = {}, {}

    # -- splitting ----------------------------------------------------------------------------------------------------

    def _split_parameters(self) -> None:
        """Replace parameters by their parts; tied ones stay one object."""
        replaced: dict[int, _Replaced] = {}
        styles = {**self.split.layers, **dict.fromkeys(self.split.per_head, Style("per_head"))}
        for path, style in styles.items():
            module = self.model.get_submodule(path)
            for own, placement in placements_of(module, style).items():
                original = module._parameters[own]
                assert original is not None
                name = f"{path}.{own}" if path else own
                if style.parts > 1:
                    self._fused[name] = style.parts
                if placement.is_shard():
                    self._tp_dims[name] = style.dim or 0
                entry = replaced.setdefault(id(original), _Replaced(original, []))
                entry.places.append((module, own, name))
        for entry in replaced.values():
            self._replace(entry, styles)
        self._replaced = list(replaced.values())

    def _replace(self, entry: _Replaced, styles: Mapping[str, Style]) -> None:
        module, own, name = entry.places[0]
        placement = placements_of(module, styles[name.rpartition(".")[0]])[own]
        part = self._part(name, entry.original, placement)
        for module, own, _ in entry.places:
            module.register_parameter(own, part)
        entry.original.grad = None
        entry.original.data = entry.original.new_empty(0)

    def _part(self, name: str, original: nn.Parameter, placement: Placement) -> nn.Parameter:
        full = original.detach()
        if name in self._fused:
            full = to_rank_order(full, parts=self._fused[name], size=self.mesh.size())
        part = nn.Parameter(distribute_tensor(full, self.mesh, [placement]))
        part.register_hook(partial(as_placed, (placement,)))
        part.requires_grad_(original.requires_grad)
        vars(part).update(vars(original))  # what the user noted on it, e.g. for weight decay
        return part

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
