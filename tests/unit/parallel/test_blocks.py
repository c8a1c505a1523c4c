"""Which submodules are blocks: found by repetition, by size, or by name, and never two owners of one parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_dist.errors import ConfigError
from lightning_dist.parallel.blocks import (
    BlockKind,
    describe_blocks,
    find_blocks,
    spans,
    survey_blocks,
    without_parameters,
)


class Layer(nn.Module):
    """Two linears; 2 * (8 * 8 + 8) = 144 parameters."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Expert(Layer):
    pass


class Net(nn.Module):
    """Embedding (5 x 8), three layers, a head (8 x 5 + 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Learner(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Net()


class Attributes(nn.Module):
    """Whatever modules, as attributes in the order given."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def names(model: nn.Module, *named: str, **options: float) -> list[str]:
    return [block.name for block in find_blocks(model, named=named, **options)]


# -- repeated


def test_children_of_a_container_are_blocks() -> None:
    blocks = find_blocks(Net())
    assert [block.name for block in blocks] == ["layers.0", "layers.1", "layers.2"]
    assert {(block.kind, block.reason, block.numel) for block in blocks} == {
        (BlockKind.REPEATED, "repeated: 3 x Layer in layers", 144)
    }
    model = Net()
    assert [block.module for block in find_blocks(model)] == list(model.layers)


def test_paths_start_at_the_lightning_module() -> None:
    assert names(Learner()) == ["model.layers.0", "model.layers.1", "model.layers.2"]


def test_the_model_may_be_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Net()
    assert [block.numel for block in find_blocks(model)] == [144] * 3


@pytest.mark.parametrize(
    ("container", "found"),
    [
        (nn.Sequential(Layer(), nn.ReLU(), Layer()), ["part.0", "part.2"]),
        (nn.ModuleDict({"a": Layer(), "b": Layer()}), ["part.a", "part.b"]),
        (nn.ModuleList([Layer(), Expert(), Expert(), Layer()]), ["part.0", "part.1", "part.2", "part.3"]),
        (nn.ModuleList([Layer(), Expert(), Expert()]), ["part.1", "part.2"]),  # one Layer is no repetition
        (nn.Sequential(nn.ReLU(), nn.ReLU(), Layer()), []),  # nothing to hold
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), ["part.0", "part.2"]),
    ],
)
def test_classes_count_by_container(container: nn.Module, found: list[str]) -> None:
    assert names(Attributes(part=container), size_fraction=1.0) == found


def test_what_is_in_a_block_is_not_looked_into() -> None:
    def outer() -> nn.Module:
        return Attributes(inner=nn.ModuleList(Layer() for _ in range(2)))

    assert names(nn.Sequential(outer(), outer())) == ["0", "1"]


def test_stages_are_looked_into() -> None:
    stages = nn.Sequential(nn.Sequential(Layer(), Layer()), nn.Sequential(Layer(), Layer(), Layer()))
    assert names(stages) == ["0.0", "0.1", "1.0", "1.1", "1.2"]
    lists = Attributes(stages=nn.ModuleList([nn.ModuleList([Layer(), Layer()]), nn.ModuleList([Layer(), Layer()])]))
    assert names(lists) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]


def test_a_sequential_of_single_layers_is_a_block() -> None:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    assert names(nn.ModuleList([layer(), layer()])) == ["0", "1"]


def test_small_layers_without_children_are_left_to_the_root() -> None:
    body = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64))
    assert names(body) == ["0", "2"]


def test_a_module_at_several_places_is_one_block() -> None:
    shared = Layer()
    blocks = find_blocks(Attributes(layers=nn.ModuleList([shared] * 4), again=shared))
    assert [(block.name, block.numel) for block in blocks] == [("layers.0", 144)]
    assert blocks[0].reason == "repeated: 4 x Layer in layers (1 of them distinct)"


# -- one owner


def tied_to_head() -> nn.Module:
    net = Net()
    net.head.weight = nn.Parameter(torch.zeros(8, 8))
    net.layers[1].up.weight = net.head.weight
    return net


def tied_to_each_other() -> nn.Module:
    net = Net()
    net.layers[1].up = net.layers[0].up
    return net


@pytest.mark.parametrize(
    ("make", "found", "left_out"),
    [
        (
            tied_to_head,
            ["layers.0", "layers.2"],
            ["layers.1 (Layer), since layers.1.up.weight is also head.weight"],
        ),
        (
            tied_to_each_other,
            ["layers.2"],
            [
                "layers.0 (Layer), since layers.0.up.weight is also layers.1.up.weight",
                "layers.1 (Layer), since layers.1.up.weight is also layers.0.up.weight",
            ],
        ),
    ],
)
def test_a_block_that_shares_a_parameter_is_left_out(
    make: Callable[[], nn.Module], found: list[str], left_out: list[str]
) -> None:
    survey = survey_blocks(make(), size_fraction=1.0)
    assert [block.name for block in survey.blocks] == found
    assert list(survey.left_out) == left_out
    assert all(f"left out: {sentence}" in describe_blocks(survey) for sentence in left_out)
    assert names(make(), size_fraction=1.0, exclusive=False) == ["layers.0", "layers.1", "layers.2"]


def test_what_is_left_out_is_left_whole() -> None:
    """Its parts are large, yet none becomes a unit."""
    assert names(tied_to_each_other(), size_fraction=0.05) == ["embed", "layers.2", "head"]


def test_a_parameter_shared_inside_one_block_stays_there() -> None:
    net = Net()
    for layer in net.layers:
        layer.down.weight = layer.up.weight
    assert [block.numel for block in find_blocks(net, size_fraction=1.0)] == [144 - 64] * 3


def test_a_block_used_twice_with_a_parameter_of_its_own_is_not_tied() -> None:
    net = Net()
    net.again = net.layers[1]
    assert names(net) == ["layers.0", "layers.1", "layers.2"]


def test_tied_embeddings_are_no_units() -> None:
    net = Net()
    net.head = nn.Linear(8, 5, bias=False)
    assert names(net, size_fraction=0.05) == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    net.head.weight = net.embed.weight
    assert names(net, size_fraction=0.05) == ["layers.0", "layers.1", "layers.2"]


# -- by size


def test_what_holds_much_outside_of_blocks_is_a_unit() -> None:
    blocks = find_blocks(Net(), size_fraction=0.08)  # the embedding has 40 of 517 parameters, the head 45
    assert [block.name for block in blocks] == ["layers.0", "layers.1", "layers.2", "head"]
    assert blocks[-1].kind is BlockKind.SIZE
    assert blocks[-1].reason == "by size: 9% of the parameters"
    assert names(Net(), size_fraction=0.11) == ["layers.0", "layers.1", "layers.2"]


def test_a_large_part_without_repetition_is_a_unit() -> None:
    assert names(Attributes(a=Layer(), b=Layer(4), c=Expert())) == ["a", "b", "c"]


def test_more_than_half_is_divided_if_it_can_be() -> None:
    whole = Attributes(small=nn.Linear(4, 4), large=Attributes(a=Layer(), b=Layer()))
    assert names(whole) == ["large.a", "large.b"]
    pieces = Attributes(**{f"piece{number}": nn.Linear(4, 4) for number in range(15)})
    assert names(Attributes(rest=Layer(), large=pieces)) == ["rest", "large"]


def test_the_whole_model_is_no_unit() -> None:
    assert names(Attributes(only=nn.Linear(8, 8))) == []
    assert names(Attributes(model=Attributes(only=Layer()))) == ["model.only.up", "model.only.down"]


def test_attention_is_not_taken_apart() -> None:
    """``out_proj`` is never called: its weight is read."""
    attention = nn.MultiheadAttention(8, 2)
    assert names(Attributes(attention=attention, rest=nn.Linear(2, 2))) == ["attention"]
    attention.out_proj.bias = nn.Parameter(torch.zeros(2))
    tied = Attributes(attention=attention, rest=nn.Linear(2, 2))
    tied.rest.bias = attention.out_proj.bias
    assert names(tied) == []


# -- named


@pytest.mark.parametrize(
    ("named", "found", "reason"),
    [
        ("Layer", ["model.layers.0", "model.layers.1", "model.layers.2"], "named: class Layer"),
        ("model.layers.*", ["model.layers.0", "model.layers.1", "model.layers.2"], "named: model.layers.*"),
        ("model.layers.[02]", ["model.layers.0", "model.layers.2"], "named: model.layers.[02]"),
        ("model.layers.1", ["model.layers.1"], "named: model.layers.1"),
        ("model.*.1.up", ["model.layers.1.up"], "named: model.*.1.up"),
        ("Embedding", ["model.embed"], "named: class Embedding"),
    ],
)
def test_names_are_classes_or_paths(named: str, found: list[str], reason: str) -> None:
    blocks = find_blocks(Learner(), named=[named])
    assert [block.name for block in blocks] == found
    assert {(block.kind, block.reason) for block in blocks} == {(BlockKind.NAMED, reason)}
    assert find_blocks(Learner(), named=named)[0].name == found[0]  # a single name need not be in a list


def test_nested_names_put_the_inner_block_first() -> None:
    model = Learner()
    blocks = find_blocks(model, named=["model", "Layer", "model.layers.1.up"])
    assert [block.name for block in blocks] == [
        *("model.layers.0", "model.layers.1.up", "model.layers.1", "model.layers.2"),
        "model",
    ]
    assert [block.numel for block in blocks] == [144, 72, 72, 144, 40 + 45]
    assert sum(block.numel for block in blocks) == sum(parameter.numel() for parameter in model.parameters())


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"'Blok' names no module of Learner") as caught:
        find_blocks(Learner(), named=["Layer", "Blok"])
    for offered in ("3 x Layer in model.layers", "model.layers.*", "Net"):
        assert offered in str(caught.value)
    with pytest.raises(ConfigError, match="names no module"):
        find_blocks(Learner(), named=["layers.*"])  # paths start at the model


def test_a_container_without_forward_can_be_no_block() -> None:
    with pytest.raises(ConfigError, match=r"layers is a ModuleList.* name its children, layers\.\*"):
        find_blocks(Net(), named=["layers"])


def test_a_named_block_must_own_its_parameters() -> None:
    with pytest.raises(ConfigError, match=r"layers\.1\.up\.weight is also head\.weight.*holds both"):
        find_blocks(tied_to_head(), named=["layers.*"])
    assert len(find_blocks(tied_to_head(), named=["layers.*"], exclusive=False)) == 3


def test_one_module_under_two_names_is_refused() -> None:
    net = Net()
    net.again = net.layers[0]
    with pytest.raises(ConfigError, match=r"layers\.0 and again are one module"):
        find_blocks(net, named=["layers.0", "again"])
    assert names(net, "Layer") == ["layers.0", "layers.1", "layers.2"]
    assert names(net, "again") == ["layers.0"]  # under its first path


# -- what others put around a module


def compiled(module: nn.Module) -> nn.Module:
    wrapped = torch.compile(module, backend="eager")
    assert isinstance(wrapped, nn.Module)
    return wrapped


def test_compiled_blocks_keep_their_wrapper() -> None:
    model = Learner()
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = compiled(layer)
    for named in ([], ["Layer"], ["model.layers.*"]):
        blocks = find_blocks(model, named=named)
        assert [block.name for block in blocks] == ["model.layers.0", "model.layers.1", "model.layers.2"]
        assert [block.module for block in blocks] == list(model.model.layers)
    assert "3 x Layer" in find_blocks(model)[0].reason
    assert names(model, "model.layers.0.up") == ["model.layers.0._orig_mod.up"]


def test_blocks_are_found_inside_a_compiled_model() -> None:
    model = Attributes(net=compiled(Net()))
    assert names(model) == ["net._orig_mod.layers.0", "net._orig_mod.layers.1", "net._orig_mod.layers.2"]
    assert names(model, "net.layers.*") == names(model)


def test_a_compiled_embedding_is_a_unit() -> None:
    model = Attributes(embed=compiled(nn.Embedding(100, 8)), layers=nn.ModuleList([Layer(), Layer()]))
    assert names(model) == ["embed", "layers.0", "layers.1"]


# -- text


def test_the_choice_is_described() -> None:
    net = tied_to_head()
    net.embed = nn.Embedding(200, 8)
    assert describe_blocks(survey_blocks(net)) == (
        "3 blocks with 1.9 k of 2.0 k parameters\n"
        "  embed: by size: 79% of the parameters, 1.6 k\n"
        "  layers.0, layers.2: repeated: 3 x Layer in layers, 144 each\n"
        "  the rest: 149\n"
        "  left out: layers.1 (Layer), since layers.1.up.weight is also head.weight"
    )


@pytest.mark.parametrize(
    ("given", "short"),
    [
        ([], ""),
        (["a.0", "a.1", "a.2", "head"], "a.0-2, head"),
        (["a.0", "a.2", "b.3", "b.4"], "a.0, a.2, b.3-4"),
        (["0", "1"], "0-1"),
        (["a.x", "a.x1"], "a.x, a.x1"),
    ],
)
def test_spans(given: list[str], short: str) -> None:
    assert spans(given) == short


def test_finding_changes_nothing() -> None:
    model = Learner()
    before = copy.deepcopy(model.state_dict())
    find_blocks(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_blocks_of_nothing_else_are_left_out() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(50, 8), "both": nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))})
    both = model["both"]
    left_out = frozenset({model["table"].weight, both[0].weight})  # type: ignore[index]
    survey = survey_blocks(model, named=("table", "both"))
    assert [(block.module, block.numel) for block in survey.blocks] == [(model["table"], 400), (both, 850)]
    kept = without_parameters(survey, left_out)
    assert [(block.module, block.numel) for block in kept.blocks] == [(both, 450)]
    assert kept.numel == survey.numel - 800
