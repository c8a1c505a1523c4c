"""Parameters that several stages use (an embedding tied to the output layer): their gradients are summed once a step.

Each rank of the stages that use one holds it, and all of them step it alike, so copies stay equal bit for bit.

Note [Two stages of one rank]
    Where the first and the last stage sit on one rank (schedules in the shape of a V), one parameter would be a leaf of
    two graphs whose backward comes in parts, and the parts of one would be taken for the other's (torch 2.13). While a
    batch runs, all users but the first hold an alias: another parameter with the same memory. Its gradient is added at
    the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from lightning_dist.comm.collectives import Collectives, RankGroup
from lightning_dist.parallel.pipeline.parts import part_of

Place = tuple[nn.Module, str]
"""A module, and the name of a parameter in it."""


class SharedParameters:
    """Sums gradients over the ranks that hold the same parameters.

    Args:
        groups: Parameters that the same ranks share, with these ranks; as many on each of them.
        collectives: The seam.
    """

    def __init__(self, groups: Sequence[tuple[Sequence[nn.Parameter], RankGroup]], collectives: Collectives) -> None:
        self._groups = groups
        self._collectives = collectives

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Give every holder the sum; who has none adds nothing, and gets none if nobody has."""
        for parameters, group in self._groups:
            trained = [p for p in parameters if p.requires_grad]
            for same_type in _by_type(trained):
                self._sum(same_type, group)

    def _sum(self, parameters: list[nn.Parameter], group: RankGroup) -> None:
        has = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
        values = [part_of(p.grad) if p.grad is not None else torch.zeros_like(part_of(p)) for p in parameters]
        flat = torch.cat([*(value.reshape(-1) for value in values), has.to(values[0].dtype)])
        self._collectives.all_reduce(flat, group)
        counts = flat[-len(parameters) :].tolist()
        offset = 0
        for parameter, value, count in zip(parameters, values, counts, strict=True):
            total = flat[offset : offset + value.numel()].view(value.shape)
            offset += value.numel()
            if not count:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            part_of(parameter.grad).copy_(total)


class LocalAliases:
    """Stands in for parameters that two stages of this rank use; see Note [Two stages of one rank].

    Args:
        places: Of each such parameter, where stages after the first that uses it hold it.
    """

    def __init__(self, places: Sequence[tuple[nn.Parameter, Sequence[Place]]]) -> None:
        self._places = places

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While a batch runs, the later users hold the aliases."""
        aliases = [_alias_of(parameter) for parameter, _ in self._places]
        for alias, (_, places) in zip(aliases, self._places, strict=True):
            for module, name in places:
                module._parameters[name] = alias
        try:
            yield
        finally:
            for alias, (parameter, places) in zip(aliases, self._places, strict=True):
                for module, name in places:
                    module._parameters[name] = parameter
                if alias.grad is not None:
                    parameter.grad = alias.grad if parameter.grad is None else parameter.grad + alias.grad


def _alias_of(parameter: nn.Parameter) -> nn.Parameter:
    """Another parameter with the same memory; what is done to the gradient of the one is done to the other's."""
    alias = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    hooks = (parameter._backward_hooks or {}) if parameter.requires_grad else {}
    for hook in hooks.values():
        alias.register_hook(hook)
    return alias


def _by_type(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    found: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.dtype, []).append(parameter)
    return list(found.values())
