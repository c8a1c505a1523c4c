"""What this rank holds of the state of a model and of its optimizers, and who holds the same; nothing is sent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_dist.errors import StateMismatchError
from lightning_dist.parallel.boxes import Spread, whole_box
from lightning_dist.parallel.full_tensors import FullTensors
from lightning_dist.topology.layout import AXIS_NAMES, Layout


@dataclass(frozen=True)
class HeldTensor:
    """This rank's part of a tensor.

    Attributes:
        names: The tensor's names, several if it is tied; the first is the one it is kept under.
        local: This rank's values.
        spread: Where they are in the whole tensor.
        holders: The ranks that hold the same values, this one among them.
        steady: If only an optimizer's step is to change the values: tensors whose version counters tell of changes by
            others. Empty where the values may change at any moment, as buffers do in a forward.
    """

    names: tuple[str, ...]
    local: Tensor
    spread: Spread
    holders: tuple[int, ...]
    steady: tuple[Tensor, ...] = ()


class Stored(NamedTuple):
    """What a stored tensor is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class TensorToFill:
    """Where a stored tensor goes on this rank.

    Attributes:
        name: What it is stored under.
        part: To be filled, contiguous in host memory; ``None`` if nothing of it is wanted here.
        spread: Which values of the whole it takes.
        place: Makes of the filled part what ``load_state_dict`` takes.
    """

    name: str
    part: Tensor | None
    spread: Spread
    place: Callable[[Tensor], Tensor]

    def value(self) -> Tensor:
        """What ``load_state_dict`` is to be given, once the part is filled; without values if none are wanted."""
        return torch.empty(self.spread.shape, device="meta") if self.part is None else self.place(self.part)


class HeldState:
    """Looks at a module as it is on this rank.

    Args:
        module: The user's.
        layout: Which rank stands where.
        rank: This one.
        full: Of what is spread; ``None`` where every tensor that is here is whole.
        axes: Of the layout, along which ranks hold different tensors altogether: ``pp`` where there are stages.
        counts: Whether this rank is to speak for a parameter or buffer; of several stages that hold it one does.
        is_here: Whether this rank holds a parameter or buffer at all.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        rank: int,
        *,
        full: FullTensors | None = None,
        axes: frozenset[str] = frozenset(),
        counts: Callable[[Tensor], bool] = lambda tensor: True,
        is_here: Callable[[Tensor], bool] = lambda tensor: True,
    ) -> None:
        self._module = module
        self._full = full
        self._counts = counts
        self._is_here = is_here
        self._axes = axes
        self._layout = layout
        self._rank = rank
        self._holders: dict[frozenset[str], tuple[int, ...]] = {}
        self._alike: frozenset[int] | None = None
        self._step_alike: frozenset[int] | None = None

    def among(self, ranks: Collection[int], *, model: bool) -> HeldState:
        """The same, where only some ranks hold what this one does.

        Args:
            ranks: Those whose optimizers have the same state.
            model: Whether the model is the same on these ranks only, too.
        """
        self._step_alike = frozenset(ranks)
        self._alike = self._step_alike if model else None
        return self

    def of_model(self, state: Mapping[str, Any]) -> Iterator[HeldTensor]:
        """The tensors of a state of the module, each once, as its names have them there.

        Args:
            state: ``state_dict()`` of the module, as this rank holds it.
        """
        names: dict[Tensor, list[str]] = {}
        for name, tensor in self._tensors():
            if isinstance(state.get(name), Tensor):
                names.setdefault(tensor, []).append(name)
        for tensor, known in names.items():
            if self._counts(tensor):
                value = state[known[0]]
                steady = _counters(tensor) if _is_stepped(tensor) and _is_same(tensor, value) else ()
                yield from self._alike_or_first(self._held(tuple(known), tensor, value, steady), tensor)
        found = {name for known in names.values() for name in known}
        for name, value in state.items():
            if name not in found and isinstance(value, Tensor):  # put there by a hook of the user's
                yield from self._alike_or_first(self._held((name,), None, value), value)

    def of_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Iterator[HeldTensor]:
        """The tensors of an optimizer's state, by the names of their parameters.

        Args:
            optimizer: Of parameters of the module.
            state: Its ``state_dict()``.
        """
        for index, (name, owner) in enumerate(self.names_of(optimizer).items()):
            entries = state["state"].get(index)
            if not isinstance(entries, Mapping) or not self._counts(owner):
                continue
            for entry, value in entries.items():
                if isinstance(value, Tensor):
                    held = self._held((f"{name}.{entry}",), owner, value, _counters(value))
                    yield _held_by(held, self._step_alike)

    # -- loading ------------------------------------------------------------------------------------------------------

    def model_to_fill(self, stored: Mapping[str, Stored]) -> Iterator[TensorToFill]:
        """Where values are to be put, so that ``load_state_dict`` of the module takes them.

        Args:
            stored: Name -> what is stored under it. What the module does not know is asked for whole.
        """
        tensors = dict(self._tensors())
        for name, described in stored.items():
            yield self._to_fill(name, tensors.get(name), described)

    def optimizer_to_fill(
        self, optimizer: torch.optim.Optimizer, stored: Mapping[str, Stored]
    ) -> Iterator[TensorToFill]:
        """Where values are to be put, so that ``load_state_dict`` of the optimizer takes them.

        Args:
            optimizer: Of parameters of the module.
            stored: Name -> what is stored under it, named as by :meth:`of_optimizer`. What belongs to parameters that
                this rank does not hold is left out.
        """
        owners = self.names_of(optimizer)
        for key, described in stored.items():
            owner = owners.get(key.rpartition(".")[0])
            if owner is not None and self._is_here(owner):
                yield self._to_fill(key, owner, described)

    def _to_fill(self, name: str, owner: Tensor | None, stored: Stored) -> TensorToFill:
        whole = whole_to_fill(name, stored)
        if owner is None:
            return whole
        if not self._is_here(owner):
            return replace(whole, part=None)
        full = self._full
        if full is None or not isinstance(owner, nn.Parameter) or not isinstance(owner, DTensor):
            return whole
        if full.shape_of(owner) != torch.Size(stored.shape):
            return replace(whole, place=functools.partial(full.cut_entry, owner))
        part = torch.empty(owner._local_tensor.shape, dtype=stored.dtype)
        return TensorToFill(name, part, full.spread_of(owner), functools.partial(full.placed, owner))

    def names_held(self, optimizer: torch.optim.Optimizer) -> dict[str, int]:
        """Name -> number in an optimizer, of its parameters that this rank holds."""
        owners = self.names_of(optimizer).items()
        return {name: number for number, (name, owner) in enumerate(owners) if self._is_here(owner)}

    # -- parts --------------------------------------------------------------------------------------------------------

    def names_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Name -> parameter; of one that is not the module's, its number."""
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        listed = enumerate(p for group in optimizer.param_groups for p in group["params"])
        return {names.get(id(parameter), f"#{index}"): parameter for index, parameter in listed}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._module.named_parameters(remove_duplicate=False)
        yield from self._module.named_buffers(remove_duplicate=False)

    def _alike_or_first(self, held: HeldTensor, tensor: Tensor) -> Iterator[HeldTensor]:
        """Parameters are alike on all ranks that hold them; of what may differ, statistics, the first.s counts."""
        held = _held_by(held, self._alike)
        if isinstance(tensor, nn.Parameter):
            yield held
        elif self._rank == held.holders[0]:
            yield replace(held, holders=(self._rank,))

    def _held(
        self, names: tuple[str, ...], owner: Tensor | None, value: Tensor, steady: tuple[Tensor, ...] = ()
    ) -> HeldTensor:
        spread = self._spread_of(owner, value)
        holders = self._holders_along(spread.axes | self._axes)
        return HeldTensor(names, local_of(value).detach(), spread, holders, steady)

    def _spread_of(self, owner: Tensor | None, value: Tensor) -> Spread:
        if isinstance(value, DTensor):
            if self._full is None or not isinstance(owner, nn.Parameter):
                raise StateMismatchError(
                    f"a DTensor of shape {tuple(value.shape)} is no parameter of the model and cannot be saved; "
                    "put a plain tensor into the checkpoint"
                )
            return self._full.spread_of_entry(owner, value)
        return Spread(tuple(value.shape), (whole_box(value.shape),), frozenset())

    def _holders_along(self, axes: frozenset[str]) -> tuple[int, ...]:
        if axes not in self._holders:
            same = [axis for axis in AXIS_NAMES if axis not in axes]
            self._holders[axes] = self._layout.group_of(self._rank, *same)
        return self._holders[axes]


def _held_by(held: HeldTensor, ranks: Collection[int] | None) -> HeldTensor:
    """The same, with the holders among some ranks."""
    if ranks is None:
        return held
    return replace(held, holders=tuple(rank for rank in held.holders if rank in ranks))


def local_of(value: Tensor) -> Tensor:
    """This rank's shard of a DTensor; a plain tensor as it is."""
    return value._local_tensor if isinstance(value, DTensor) else value


def _is_same(tensor: Tensor, value: Tensor) -> bool:
    """Whether the value in a state is a parameter itself, not what a hook has put there under its name."""
    return isinstance(tensor, nn.Parameter) and local_of(tensor).data_ptr() == local_of(value).data_ptr()


def _is_stepped(tensor: Tensor) -> bool:
    """Whether an optimizer's step changes it; who changes a frozen one (averages of weights) does so at any moment."""
    return tensor.requires_grad


def _counters(tensor: Tensor) -> tuple[Tensor, ...]:
    """Of a DTensor there are two: its operations count under its own, those on the local tensor under that one's."""
    found = tuple(dict.fromkeys((tensor, local_of(tensor))))
    return () if any(each.is_inference() for each in found) else found


def whole_to_fill(name: str, stored: Stored) -> TensorToFill:
    """A tensor that is wanted whole."""
    spread = Spread(stored.shape, (whole_box(stored.shape),), frozenset())
    return TensorToFill(name, torch.empty(stored.shape, dtype=stored.dtype), spread, _as_it_is)


def _as_it_is(part: Tensor) -> Tensor:
    return part
