"""The description of what a rank holds is made anew where anything but values has changed, and only then."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_dist.parallel.held_state import HeldState, HeldTensor
from lightning_dist.parallel.held_tensors import HeldTensors
from lightning_dist.topology.layout import Axes, Layout
from lightning_dist.topology.spec import Cluster


class Run:
    """A model with a buffer, and its optimizer after a step."""

    def __init__(self) -> None:
        self.model = nn.BatchNorm1d(3)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.held = HeldTensors()
        self.looks = 0
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 3)).square().sum().backward()
        self.optimizer.step()

    def look(self) -> HeldState:
        self.looks += 1
        cluster = Cluster(("a",))
        return HeldState(self.model, Layout.in_rank_order(cluster, Axes(dp_replicate=1)), 0)

    def describe(self) -> list[HeldTensor]:
        state = self.optimizer.state_dict()
        prefixes: Callable[[int | None], str] = lambda index: "m/" if index is None else f"o{index}/"  # noqa: E731
        return self.held.of(self.look, self.model.state_dict(), [self.optimizer], [state], prefixes=prefixes)

    def values(self) -> dict[str, torch.Tensor]:
        return {each.names[0]: each.local.clone() for each in self.describe()}

    def expected(self) -> dict[str, torch.Tensor]:
        found = {f"m/{name}": value for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for entry, value in self.optimizer.state[parameter].items():
                found[f"o0/{name}.{entry}"] = value
        return found

    def is_right(self) -> bool:
        got, wanted = self.values(), self.expected()
        return got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_steps_change_values_only() -> None:
    run = Run()
    first = run.describe()
    for _ in range(2):
        run.step()
        assert run.describe() is first
        assert run.is_right()
    assert run.looks == 1
    assert list(run.held.names_of(0)) == ["weight", "bias"]


def freeze(run: Run) -> None:
    run.model.bias.requires_grad_(False)


def replace_parameter_data(run: Run) -> None:
    run.model.weight.data = run.model.weight.data.clone() + 1


def replace_buffer(run: Run) -> None:
    run.model.running_mean = torch.full((3,), 7.0)


def reload_optimizer(run: Run) -> None:
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def replace_entry_data(run: Run) -> None:
    entry = run.optimizer.state[run.model.weight]["exp_avg"]
    entry.data = entry.data + 1


def forget_entry(run: Run) -> None:
    del run.optimizer.state[run.model.bias]


def add_buffer(run: Run) -> None:
    run.model.register_buffer("more", torch.ones(2))


@pytest.mark.parametrize(
    "change",
    [
        freeze,
        replace_parameter_data,
        replace_buffer,
        reload_optimizer,
        replace_entry_data,
        forget_entry,
        add_buffer,
    ],
)
def test_other_changes_are_seen(change: Callable[[Run], None]) -> None:
    run = Run()
    first = run.describe()
    change(run)
    assert run.describe() is not first
    assert run.looks == 2
    assert run.is_right()
