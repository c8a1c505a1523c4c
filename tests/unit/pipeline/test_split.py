"""Layers dealt to stages."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn

from lightning_dist.errors import ConfigError
from lightning_dist.parallel.pipeline import PipelineLayer, find_layers
from lightning_dist.parallel.pipeline.cut import cost_of, cut_model
from lightning_dist.parallel.pipeline.split import check_split, split_evenly


def all_splits(layers: int, stages: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, layers), stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *cut, layers))) for cut in cuts]


def costs_of(counts: tuple[int, ...], costs: list[float]) -> list[float]:
    ends = list(itertools.accumulate(counts, initial=0))
    return [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("seed", range(8))
def test_no_other_split_has_a_cheaper_dearest_stage(seed: int) -> None:
    generator = random.Random(seed)
    layers = generator.randint(3, 9)
    stages = generator.randint(1, layers)
    costs = [float(generator.randint(0, 9)) for _ in range(layers)]
    chosen = split_evenly(costs, stages)
    assert chosen in all_splits(layers, stages)
    best = min(max(costs_of(counts, costs)) for counts in all_splits(layers, stages))
    assert max(costs_of(chosen, costs)) == best


def test_of_equally_good_splits_the_most_even_is_taken() -> None:
    assert split_evenly([9.0, 1.0, 1.0, 1.0, 1.0], 3) == (1, 2, 2)
    assert split_evenly([1.0] * 10, 4) in {
        (2, 3, 3, 2),
        (3, 2, 2, 3),
        (3, 3, 2, 2),
        (2, 2, 3, 3),
        (2, 3, 2, 3),
        (3, 2, 3, 2),
    }


def test_too_few_layers_and_wrong_splits_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 layers cannot make 3 pipeline stages"):
        split_evenly([1.0, 1.0], 3)
    with pytest.raises(ConfigError, match="deals out 5 layers, and the model has 6"):
        check_split([2, 3], 6)


# -- what a model says ------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"tokens": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
        self.inner["head"].weight = self.inner["tokens"].weight
        self.inner["blocks"] = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.inner["tokens"](tokens)
        for block in self.inner["blocks"]:
            x = block(x)
        return self.inner["head"](x) * 2

    def pipeline_layers(self) -> list[object]:
        inner = self.inner
        return [inner["tokens"], *inner["blocks"], PipelineLayer(lambda x: inner["head"](x) * 2, inner["head"])]


def test_layers_by_method_by_path_and_by_attribute() -> None:
    found = find_layers(Tied(), None)
    assert found.root_name == "", "a ModuleDict is not what is called"
    assert [layer.name for layer in found.layers] == [
        "inner.tokens",
        *(f"inner.blocks.{i}" for i in range(3)),
        "inner.head",
    ]
    outer = nn.Module()
    outer.net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    for path in ("net", None):
        outer.pipeline_layers = "net"
        found = find_layers(outer, path)
        assert (found.root, found.root_name, len(found.layers)) == (outer.net, "net", 3)


def test_a_list_of_layers_is_not_what_is_called() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](x))

    outer = nn.Module()
    outer.inner = Inner()
    outer.pipeline_layers = lambda: list(outer.inner.blocks)  # type: ignore[assignment]
    assert find_layers(outer, None).root_name == "inner"
    assert find_layers(outer, "inner.blocks").root_name == "inner"


def test_what_is_tied_is_shared_and_what_is_beside_belongs_to_the_last_stage() -> None:
    model = Tied()
    cut = cut_model(model, find_layers(model, None), (2, 2, 1), (0, 1, 2))
    tokens = model.inner["tokens"].weight
    assert cut.shared() == {(0, 2): [tokens]}
    assert cut.owner(tokens) == 0
    assert cut.holders(model.temperature) == (2,)
    assert cut.beside(model) == [model.temperature]
    in_a_v = cut_model(model, find_layers(model, None), (1, 1, 2, 1), (0, 1, 1, 0))
    assert in_a_v.shared() == {}
    assert in_a_v.aliased(0) == [(tokens, [(model.inner["head"], "weight")])]
    assert in_a_v.aliased(1) == []


def test_an_embedding_costs_nothing_and_an_output_layer_tied_to_it_does() -> None:
    layers = find_layers(Tied(), None).layers
    assert [cost_of(layer) for layer in layers] == [1.0, 21.0, 21.0, 21.0, 21.0]


@pytest.mark.parametrize(
    ("said", "path", "message"),
    [
        (None, None, "does not say how it splits into pipeline stages"),
        ([], None, "gave no layers"),
        ([3], None, "each layer must be a module"),
        ([nn.Linear(1, 1)], None, "that is no module of it"),
        (None, "nowhere", "has no such module"),
        (None, "net.0", "must be an nn.Sequential or nn.ModuleList"),
    ],
)
def test_what_a_model_says_wrongly_is_refused(said: object, path: str | None, message: str) -> None:
    model = nn.Module()
    model.net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if said is not None:
        vars(model)["pipeline_layers"] = lambda: said
    with pytest.raises(ConfigError, match=message):
        find_layers(model, path)


def test_a_module_in_two_layers_is_refused_unless_it_holds_nothing() -> None:
    act, linear = nn.Tanh(), nn.Linear(2, 2)
    assert len(find_layers(nn.Sequential(linear, act, nn.Linear(2, 2), act), "").layers) == 4
    with pytest.raises(ConfigError, match="hold the same module"):
        find_layers(nn.Sequential(linear, act, linear), "")


class WithStart(nn.Module):
    """Its blocks are in a list, which cannot be called, and its first layer uses a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential()  # to be called; its forward does not matter here
        self.model.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.model.start = nn.Parameter(torch.ones(2))

    def pipeline_layers(self) -> list[object]:
        first, *others = self.model.blocks
        return [PipelineLayer(lambda x: first(x) + self.model.start, first, self.model.start), *others]


def test_a_layer_may_use_parameters_by_themselves() -> None:
    model = WithStart()
    found = find_layers(model, None)
    assert found.layers[0].name == "model.blocks.0, model.start"
    assert found.root_name == "model", "what holds all layers and can be called"
    cut = cut_model(model, found, (2, 1), (0, 1))
    assert cut.holders(model.model.start) == (0,)
    assert cut.beside(model) == []


def test_a_parameter_by_itself_is_in_one_layer() -> None:
    model = WithStart()
    start, blocks = model.model.start, model.model.blocks
    layers = [PipelineLayer(blocks[0], blocks[0], start), PipelineLayer(blocks[1], blocks[1], start), blocks[2]]
    vars(model)["pipeline_layers"] = lambda: layers
    with pytest.raises(ConfigError, match="use the same parameter, which one of them names by itself"):
        find_layers(model, None)


def test_parts_of_the_forward_that_are_in_no_layer_are_refused() -> None:
    model = WithStart()
    with pytest.raises(ConfigError, match=r"make up self.model, and model.start is in none of them"):
        find_layers(model, "model.blocks")


def test_a_wrong_path_is_answered_with_those_that_hold_layers() -> None:
    with pytest.raises(ConfigError, match=r"no such module; .* hold layers: model, model.blocks"):
        find_layers(WithStart(), "blocks")
