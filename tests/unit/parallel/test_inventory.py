"""A module's parameters, described."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dist.errors import ConfigError, UnknownOptionError
from lightning_dist.parallel.inventory import InventoryEntry, inventory_of
from lightning_dist.planning.memory_cost import memory_cost
from lightning_dist.planning.training import ADAMW, TrainingSetup
from lightning_dist.topology.layout import Axes


class Tied(nn.Module):
    """7 -> 13 -> 7 twice, between an embedding and a head that are one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 7)) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(7, 5, bias=False)
        self.head.weight = self.tokens.weight


BLOCKS = ("blocks.0", "blocks.1")


def test_each_parameter_once_with_its_block() -> None:
    entries = {entry.name: entry for entry in inventory_of(Tied(), blocks=BLOCKS)}
    assert list(entries) == [
        "scale",
        "tokens.weight",
        *(f"blocks.{b}.{layer}.{name}" for b in (0, 1) for layer in (0, 1) for name in ("weight", "bias")),
    ]
    assert entries["tokens.weight"] == InventoryEntry("tokens.weight", (5, 7), 4, True, None, None)
    assert entries["blocks.1.0.weight"] == InventoryEntry("blocks.1.0.weight", (13, 7), 4, True, 1, None)
    assert entries["scale"].shape == ()


def test_a_module_on_the_meta_device_of_another_type_and_frozen_in_part() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).bfloat16()
    module[0].requires_grad_(False)
    entries = inventory_of(module, blocks=["0"])
    assert [(e.shape, e.dtype_bytes, e.trainable, e.block) for e in entries] == [
        ((5, 3), 2, False, 0),
        ((5,), 2, False, 0),
        ((1, 5), 2, True, None),
        ((1,), 2, True, None),
    ]


def test_what_is_tied_across_blocks_is_in_none_and_within_one_in_it() -> None:
    module = Tied()
    module.blocks[1][0].weight = module.blocks[0][0].weight
    module.blocks[1][1].bias = module.blocks[1][0].bias
    blocks = {entry.name: entry.block for entry in inventory_of(module, blocks=BLOCKS)}
    assert blocks["blocks.0.0.weight"] is None
    assert "blocks.1.0.weight" not in blocks
    assert blocks["blocks.1.0.bias"] == 1
    assert "blocks.1.1.bias" not in blocks


def test_a_module_used_twice_is_one_block() -> None:
    layer = nn.Linear(3, 3)
    entries = inventory_of(nn.Sequential(layer, nn.Linear(3, 3), layer), blocks=["0", "1", "2"])
    assert [(entry.name, entry.block) for entry in entries] == [
        ("0.weight", 0),
        ("0.bias", 0),
        ("1.weight", 1),
        ("1.bias", 1),
    ]


def test_a_parameter_belongs_to_the_innermost_block() -> None:
    module = nn.ModuleDict({"a": nn.ModuleDict({"b": nn.Linear(1, 1), "c": nn.Linear(1, 1)}), "ab": nn.Linear(1, 1)})
    entries = {entry.name: entry.block for entry in inventory_of(module, blocks=["a.b", "a"])}
    assert entries["a.b.weight"] == 0
    assert entries["a.c.weight"] == 1
    assert entries["ab.weight"] is None


def test_tp_dims_by_any_name() -> None:
    entries = {e.name: e.tp_dim for e in inventory_of(Tied(), tp_dims={"head.weight": 0, "blocks.0.1.weight": 1})}
    assert entries["tokens.weight"] == 0
    assert entries["blocks.0.1.weight"] == 1
    assert entries["blocks.0.0.weight"] is None


def test_an_empty_module() -> None:
    assert inventory_of(nn.Identity()) == ()


def test_wrong_names_are_refused() -> None:
    with pytest.raises(UnknownOptionError, match=r"block='blocks\.2' is unknown.*Did you mean blocks\.\d"):
        inventory_of(Tied(), blocks=["blocks.2"])
    with pytest.raises(UnknownOptionError, match=r"tp_dims='head\.bias' is unknown"):
        inventory_of(Tied(), tp_dims={"head.bias": 0})
    with pytest.raises(ConfigError, match=r"blocks\.0 is listed twice"):
        inventory_of(Tied(), blocks=["blocks.0", "blocks.0"])


def test_what_has_no_shape_yet_is_refused() -> None:
    with torch.device("meta"):
        module = nn.Module()
        module.weight = nn.UninitializedParameter()
    with pytest.raises(ConfigError, match="weight has no shape yet"):
        inventory_of(module)


def test_the_cost_model_takes_an_inventory_as_it_is() -> None:
    module = Tied()
    setup = TrainingSetup(mode="ddp", axes=Axes(), optimizer=ADAMW)
    cost = memory_cost(inventory_of(module, blocks=BLOCKS), setup)
    assert cost.rank.rest.parameters == sum(p.numel() * 4 for p in module.parameters())
