"""Plans of tensor parallelism: what they mean for a model, and what is refused; rows of fused layers; mesh order."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from examples.model import GPT, MLP, Learner
from lightning_dist.errors import CombinationError, ConfigError, PlacementError, UnknownOptionError
from lightning_dist.parallel.tensor import READY_PLANS, split_model, survey
from lightning_dist.parallel.tensor.mesh import ascending, block_of
from lightning_dist.parallel.tensor.plan import Split
from lightning_dist.parallel.tensor.rows import to_part_order, to_rank_order
from lightning_dist.parallel.tensor.styles import STYLES, ModuleFacts, Style
from lightning_dist.run_config import AdamWConfig, GPTConfig, MLPConfig
from lightning_dist.topology import Axes, Cluster, Layout
from tests.distributed.split_models import Decoder

MLP_CONFIG = MLPConfig(n_layer=2, n_features=7, n_hidden=18)
GPT_CONFIG = GPTConfig(vocab_size=24, block_size=8, n_layer=2, n_head=4, n_embd=12)


def split(model: nn.Module, plan: Any = "auto", size: Any = 2) -> Split:
    return split_model(survey(model), size=size, plan=plan)


def styles_of(found: Split) -> dict[str, str]:
    return {path: str(style) for path, style in found.layers.items()}


# -- styles -----------------------------------------------------------------------------------------------------------


PLAIN_STYLES = [style for style in STYLES if style not in ("fused_column", "heads")]


@pytest.mark.parametrize("text", [*PLAIN_STYLES, "fused_column:3", "heads:", "heads:a,b"])
def test_a_style_is_read_and_written_alike(text: str) -> None:
    assert str(Style.parse("x", text)) == text


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("columns", UnknownOptionError, "Did you mean column"),
        ("fused_column", ConfigError, "fused_column:3 for query, key and value"),
        ("fused_column:1", ConfigError, "2 or more"),
        ("fused_column:x", ConfigError, "2 or more"),
        ("heads", ConfigError, "heads:n_head"),
        ("row:1", ConfigError, "row takes nothing after a colon"),
        (3, ConfigError, "needs the name of a style"),
    ],
)
def test_a_wrong_style_says_what_to_write(text: object, error: type[ConfigError], said: str) -> None:
    with pytest.raises(error, match=said):
        Style.parse("x", text)


# -- ready plans ------------------------------------------------------------------------------------------------------


def test_the_gpt_of_the_examples() -> None:
    found = split(GPT(GPT_CONFIG))
    assert found.plan == "gpt"
    assert styles_of(found) == {
        "tokens": "embedding",
        "head": "head",
        **{f"blocks.{i}.attention.qkv": "fused_column:3" for i in range(2)},
        **{f"blocks.{i}.attention.out": "row" for i in range(2)},
        **{f"blocks.{i}.up": "column" for i in range(2)},
        **{f"blocks.{i}.down": "row" for i in range(2)},
    }
    assert found.heads == {f"blocks.{i}.attention": {"n_head": 2} for i in range(2)}
    assert found.has_head


def test_names_may_have_a_module_around_them() -> None:
    found = split(Learner(GPT_CONFIG, AdamWConfig(), max_steps=1))
    assert found.plan == "gpt"
    assert set(found.layers) == {f"model.{path}" for path in split(GPT(GPT_CONFIG)).layers}


def test_the_mlp_of_the_examples() -> None:
    found = split(MLP(MLP_CONFIG), size=3)
    assert found.plan == "mlp"
    assert styles_of(found) == {f"blocks.{i}.{j}": style for i in range(2) for j, style in ((0, "column"), (2, "row"))}
    assert not found.has_head


def test_hugging_face_names() -> None:
    found = split(Decoder())
    assert found.plan == "huggingface"
    assert styles_of(found)["layers.1.self_attn.k_proj"] == "column"
    assert styles_of(found)["layers.1.mlp.down_proj"] == "row"
    assert styles_of(found)["lm_head"] == "head"
    assert found.per_head == {f"layers.{i}.self_attn.{name}" for i in range(2) for name in ("q_norm", "k_norm")}
    assert found.heads == {}, "these modules count no heads, they cut by the size of a head"


def test_what_is_optional_may_be_missing() -> None:
    model = Decoder()
    del model.lm_head, model.embed_tokens
    assert not split(model).has_head


@pytest.mark.parametrize("name", READY_PLANS)
def test_a_plan_by_name(name: str) -> None:
    model = {"gpt": GPT(GPT_CONFIG), "huggingface": Decoder(), "mlp": MLP(MLP_CONFIG)}[name]
    assert split(model, name) == split(model)
    other = "mlp" if name != "mlp" else "gpt"
    with pytest.raises(ConfigError, match="matches no module"):
        split(model, other)


def test_no_ready_plan_lists_the_layers() -> None:
    model = nn.ModuleDict({"encoder": nn.ModuleList(nn.Linear(4, 6) for _ in range(3)), "table": nn.Embedding(5, 4)})
    with pytest.raises(ConfigError, match=r"no ready plan \(gpt, huggingface, mlp\) matches") as caught:
        split(model)
    assert "encoder.* (Linear 4 -> 6) x3, table (Embedding 5 -> 4)" in str(caught.value)
    with pytest.raises(ConfigError, match="no Linear and no Embedding"):
        split(nn.Sequential(nn.GELU()))


def test_an_unknown_plan() -> None:
    with pytest.raises(UnknownOptionError, match="Did you mean gpt"):
        split(GPT(GPT_CONFIG), "gtp")
    with pytest.raises(ConfigError, match="got list"):
        split(GPT(GPT_CONFIG), ["gpt"])
    with pytest.raises(ConfigError, match="the plan is empty"):
        split(GPT(GPT_CONFIG), {})
    with pytest.raises(ConfigError, match="a pattern is a string"):
        split(GPT(GPT_CONFIG), {3: "row"})


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2"])
def test_a_size_is_a_number_of_ranks(size: object) -> None:
    with pytest.raises(ConfigError, match="a number of ranks"):
        split(GPT(GPT_CONFIG), size=size)


# -- patterns ---------------------------------------------------------------------------------------------------------

UP_DOWN = {"*.up": "column", "*.down": "row"}
ATTENTION = {"*attention": "heads:n_head", "*.qkv": "fused_column:3", "*.out": "row"}


def test_the_last_pattern_that_matches_counts() -> None:
    found = split(GPT(GPT_CONFIG), {**UP_DOWN, "blocks.0.*": "replicate"})
    assert styles_of(found) == {"blocks.1.up": "column", "blocks.1.down": "row"}


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({**UP_DOWN, "*.upp": "column"}, r"'\*.upp' matches no module; .* blocks.\*.up \(Linear 12 -> 48\) x2"),
        ({**UP_DOWN, "*.norm1": "column"}, r"column is for layers, but it matches only blocks.0.norm1 \(LayerNorm\)"),
        ({**UP_DOWN, "positions": "column"}, r"positions \(Embedding 8 -> 12\): column is for layers of kind linear"),
        ({**UP_DOWN, "*.qkv": "embedding"}, "embedding is for layers of kind embedding; write column"),
        ({**UP_DOWN, "*attention": "heads:heads"}, "none of blocks.0.attention .* has a whole number"),
        ({**UP_DOWN, "*.dropout": "replicate"}, "blocks.1.dropout .* has none of its own"),
        ({**UP_DOWN, "blocks": "per_head"}, r"blocks \(ModuleList\) has none of its own"),
        ({"*.up": "column"}, "the output of blocks.0.up, blocks.1.up is split, and no row layer takes it"),
        ({"*.down": "row"}, "no column layer makes them"),
        ({"*.up": "replicate"}, "splits no layer"),
        ({"*.qkv": "fused_column:3", "*.out": "row"}, r"counts heads in n_head, .*'heads:n_head'"),
    ],
)
def test_a_plan_that_does_not_fit_the_model(plan: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        split(GPT(GPT_CONFIG), plan)


def test_heads_may_be_left_as_they_are_if_that_is_said() -> None:
    assert split(GPT(GPT_CONFIG), {**ATTENTION, "*attention": "heads:"}).heads == {}


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "size", "said"),
    [
        (ATTENTION, 8, "36 features out in each of 3"),
        (ATTENTION, 6, "n_head=4 heads cannot be dealt"),
        (UP_DOWN, 5, r"blocks.0.up \(Linear 12 -> 48\): column splits its 48 features out over 5 .* make it 50"),
        ({"tokens": "embedding", "head": "head"}, 7, "splits its 24 rows over 7 .* make it 28"),
        ({"*.up": "column", "*attention.out": "row"}, 16, "row splits its 12 features in over 16"),
    ],
)
def test_sizes_that_leave_a_rest(plan: dict[str, str], size: int, said: str) -> None:
    with pytest.raises(CombinationError, match=said):
        split(GPT(GPT_CONFIG), plan, size)


def test_no_head_is_cut() -> None:
    with pytest.raises(CombinationError, match=r"k_proj .* has 2 heads of 3 features, .* dealt to 6 ranks"):
        split(Decoder(), {"*.k_proj": "column", "*.o_proj": "row"}, 6)


# -- ties and owners --------------------------------------------------------------------------------------------------


def test_tied_layers_are_split_alike_or_not_at_all() -> None:
    with pytest.raises(CombinationError, match=r"tokens .* with head, .* the one is embedding, the other whole"):
        split(GPT(GPT_CONFIG), {"tokens": "embedding"})
    with pytest.raises(CombinationError, match="write embedding and head"):
        split(GPT(GPT_CONFIG), {"tokens": "embedding", "head": "row", "*.up": "column"})
    assert "tokens" not in split(GPT(GPT_CONFIG), UP_DOWN).layers


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(4))


def test_parameters_beside_column_layers_must_be_declared() -> None:
    model = nn.ModuleDict({"a": Scaled()})
    with pytest.raises(ConfigError, match=r"a \(Scaled\) holds a.up \(column\) and parameters of its own \(scale\)"):
        split(model, UP_DOWN)
    assert split(model, {**UP_DOWN, "a": "replicate"}).replicated == {"a"}
    assert split(model, {**UP_DOWN, "a": "per_head"}).per_head == {"a"}


class Cutting(nn.Module):
    """Cuts features into heads by an attribute, its layers held as ``hold`` says."""

    def __init__(self, attribute: str, hold: Any) -> None:
        super().__init__()
        setattr(self, attribute, 4)
        self.inner = hold({"up": nn.Linear(4, 8)})
        self.down = nn.Linear(8, 4)


@pytest.mark.parametrize("attribute", ["heads", "n_head", "num_heads", "nheads", "num_query_heads", "n_local_heads"])
@pytest.mark.parametrize("hold", [nn.ModuleDict, lambda layers: nn.Sequential(OrderedDict(layers))])
def test_who_cuts_into_heads_is_found_by_name_and_behind_containers(attribute: str, hold: Any) -> None:
    model = nn.ModuleDict({"a": Cutting(attribute, hold)})
    with pytest.raises(ConfigError, match=rf"a \(Cutting\) holds a.inner.up \(column\) and counts .* {attribute}"):
        split(model, UP_DOWN)
    assert split(model, {**UP_DOWN, "a": f"heads:{attribute}"}).heads == {"a": {attribute: 2}}


@pytest.mark.parametrize("attribute", ["head_dim", "d_head", "dim_head", "head_size", "ahead", "headroom"])
def test_the_size_of_a_head_is_no_number_of_heads(attribute: str) -> None:
    assert split(nn.ModuleDict({"a": Cutting(attribute, nn.ModuleDict)}), UP_DOWN).heads == {}


def test_a_sequential_that_closes_what_it_opens_is_no_matter_of_its_owner() -> None:
    class Layered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    assert split(nn.ModuleDict({"a": Layered()}), {"*mlp.0": "column", "*mlp.2": "row"}).replicated == frozenset()


@pytest.mark.parametrize(
    "between", [nn.GLU(), nn.Softmax(-1), nn.LayerNorm(8, elementwise_affine=False), nn.GroupNorm(2, 8, affine=False)]
)
@pytest.mark.parametrize("plan", ["auto", "mlp", {"*.0": "column", "*.2": "row"}])
def test_what_mixes_features_is_refused_between_column_and_row(between: nn.Module, plan: Any) -> None:
    width = 16 if isinstance(between, nn.GLU) else 8
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Sequential(nn.Linear(4, width), between, nn.Linear(8, 4))])})
    with pytest.raises(CombinationError, match=rf"{type(between).__name__}\) comes after blocks.0.0 \(column\)"):
        split(model, plan)
    if isinstance(between, nn.GLU):
        assert split(model, {"*.0": "fused_column:2", "*.2": "row"}).layers.keys() == {"blocks.0.0", "blocks.0.2"}


# -- layers that cannot be split --------------------------------------------------------------------------------------


class Conv1D(nn.Module):
    """As Hugging Face's GPT-2 has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.zeros(nx, nf))


class ScaledLinear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.gain = nn.Parameter(torch.ones(4))


def _pruned() -> nn.Module:
    return prune.random_unstructured(nn.Linear(4, 4), "weight", 0.5)


def _parametrized() -> nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize(
    ("make", "name", "style", "said"),
    [
        (lambda: Conv1D(12, 4), "x", "column", "a Linear transposed"),
        (lambda: nn.MultiheadAttention(4, 2), "x.out_proj", "row", "uses the weights of its layers without calling"),
        (_parametrized, "x", "column", "parametrization"),
        (_pruned, "x", "column", r"its weight is made of bias, weight_orig by a hook .*remove the hook"),
        (lambda: torch.nn.utils.spectral_norm(nn.Linear(4, 4)), "x", "row", "weight_orig by a hook"),
        (ScaledLinear, "x", "column", r"parameters of its own beside weight and bias \(gain\)"),
        (lambda: nn.LazyLinear(4), "x", "column", "not known before its first forward"),
        (lambda: nn.Linear(4, 4, device="meta"), "x", "column", "meta device"),
        (lambda: nn.Embedding(4, 4, max_norm=1.0), "x", "embedding", "max_norm"),
        (lambda: nn.Embedding(4, 4, sparse=True), "x", "embedding", "sparse"),
    ],
)
def test_layers_that_cannot_be_split(make: Any, name: str, style: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        split(nn.ModuleDict({"x": make()}), {name: style})


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_they_are_no_obstacle_where_the_plan_does_not_name_them() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 8), "b": nn.Linear(8, 4), "c": Conv1D(4, 4), "d": nn.LazyLinear(4)})
    assert split(model, {"a": "column", "b": "row"}).layers.keys() == {"a", "b"}


def test_the_facts_of_a_module() -> None:
    facts = {facts.path: facts for facts in survey(GPT(GPT_CONFIG))}
    assert facts["tokens"].tied == ("head",)
    assert facts["blocks.0.attention"].head_counts == {"n_head": 4}
    assert facts["blocks.0.norm1"].own_parameters == ("weight", "bias")
    assert facts["head"].own_parameters == ("weight",)
    assert str(ModuleFacts("")) == "the model itself (Module)"


# -- rows and meshes --------------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 2))
def test_each_rank_gets_its_part_of_each_part(parts: int, size: int, rows: int, columns: int) -> None:
    tensor = torch.arange(parts * size * rows * columns).view(-1, columns)
    by_rank = to_rank_order(tensor, parts=parts, size=size)
    for rank, own in enumerate(by_rank.chunk(size)):
        expected = torch.cat([part.chunk(size)[rank] for part in tensor.chunk(parts)])
        assert torch.equal(own, expected)
    assert torch.equal(to_part_order(by_rank, parts=parts, size=size), tensor)
    assert torch.equal(to_part_order(by_rank[:, 0], parts=parts, size=size), tensor[:, 0])


def test_members_of_all_groups_of_a_mesh_ascend() -> None:
    layout = Layout.place(Cluster(("b", "a", "b", "a")), Axes(dp_shard=2, tp=2))
    assert ascending(block_of(layout, 0)) == [[[0, 2], [1, 3]]]
    assert ascending([[[6, 4], [2, 0]], [[7, 5], [3, 1]]]) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    with pytest.raises(PlacementError, match="ascending order"):
        ascending([[[0, 5], [1, 4]]])
