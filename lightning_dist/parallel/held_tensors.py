"""What a rank holds of a model and its optimizers, described once for all saves that find the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_dist.parallel.held_state import HeldState, HeldTensor, local_of


class _Place(NamedTuple):
    """Where a value of a state lies; while somebody holds on to it, nothing else lies there."""

    pointer: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class HeldTensors:
    """Describes what is to be saved; the same list again where nothing of it has changed but values.

    A ``state_dict()`` has other tensors each time, over the same memory; an optimizer's has the optimizer's own.
    """

    def __init__(self) -> None:
        self._described: list[HeldTensor] = []
        self._names: list[list[str]] = []
        self._model: list[tuple[str, _Place]] | None = None
        self._entries: list[tuple[Tensor, int]] = []
        self._stepped: list[tuple[Tensor, bool]] = []

    def of(
        self,
        held: Callable[[], HeldState],
        model: Mapping[str, Any],
        optimizers: Sequence[torch.optim.Optimizer],
        states: Sequence[Mapping[str, Any]],
        *,
        prefixes: Callable[[int | None], str],
    ) -> list[HeldTensor]:
        """All tensors of a save.

        Args:
            held: Looks at the module.
            model: Its state, as this rank holds it.
            optimizers: Of the module.
            states: Of the first optimizers, in their order.
            prefixes: Number of an optimizer, or ``None`` for the model -> what its names begin with.
        """
        stepped = [parameter for each in optimizers for group in each.param_groups for parameter in group["params"]]
        entries = [tensor for state in states for tensor in _tensors_of(state)]
        if self._is_known(model, stepped, entries):
            return self._described
        here = held()
        described = list(_named(prefixes(None), here.of_model(model)))
        for index, state in enumerate(states):
            described += _named(prefixes(index), here.of_optimizer(optimizers[index], state))
        self._described = described
        self._names = [list(here.names_of(each)) for each in optimizers]
        self._model = [(name, _place_of(value)) for name, value in _tensors_in(model)]
        self._entries = [(tensor, local_of(tensor).data_ptr()) for tensor in entries]
        self._stepped = [(parameter, parameter.requires_grad) for parameter in stepped]
        return described

    def names_of(self, index: int) -> Sequence[str]:
        """Names of an optimizer's parameters in the newest save, by their numbers there."""
        return self._names[index]

    def _is_known(self, model: Mapping[str, Any], stepped: list[Tensor], entries: list[Tensor]) -> bool:
        if self._model is None or len(stepped) != len(self._stepped) or len(entries) != len(self._entries):
            return False
        # Without generators: this is looked at for each of many tensors, in a step that waits for it.
        for parameter, (known, was_trained) in zip(stepped, self._stepped, strict=True):
            if parameter is not known or parameter.requires_grad != was_trained:
                return False
        for entry, (known, pointer) in zip(entries, self._entries, strict=True):
            if entry is not known or local_of(entry).data_ptr() != pointer:
                return False
        present = _tensors_in(model)
        if len(present) != len(self._model):
            return False
        for (name, value), (known_name, place) in zip(present, self._model, strict=True):
            if name != known_name or _place_of(value) != place:
                return False
        return True


def _tensors_of(state: Mapping[str, Any]) -> Iterator[Tensor]:
    for entries in state["state"].values():
        if isinstance(entries, Mapping):
            for value in entries.values():
                if isinstance(value, Tensor):
                    yield value


def _tensors_in(model: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in model.items() if isinstance(value, Tensor)]


def _place_of(value: Tensor) -> _Place:
    local = local_of(value)
    return _Place(local.data_ptr(), local.shape, local.stride(), local.dtype)


def _named(prefix: str, tensors: Iterator[HeldTensor]) -> Iterator[HeldTensor]:
    for held in tensors:
        yield replace(held, names=tuple(f"{prefix}{name}" for name in held.names))
