"""Parameters made on the meta device: values of reset_parameters, ties kept, refusals that say what to write."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dist.errors import ConfigError
from lightning_dist.parallel.beside_shards import unshardable
from lightning_dist.parallel.materialize import is_on_meta, materialize

CPU = torch.device("cpu")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_values_are_those_of_the_constructor() -> None:
    torch.manual_seed(3)
    expected = net()
    with torch.device("meta"):
        model = net()
    assert is_on_meta(model)
    torch.manual_seed(3)
    materialize(model, CPU)
    assert not is_on_meta(model)
    for (name, value), other in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


def test_a_block_can_be_left_for_later() -> None:
    with torch.device("meta"):
        model = net()
    materialize(model, CPU, skip=[model[2]])
    assert not model[0].weight.is_meta
    assert model[2].weight.is_meta


def test_what_has_values_keeps_them() -> None:
    with torch.device("meta"):
        model = net()
    model[0] = nn.Linear(3, 4)
    before = model[0].weight.clone()
    materialize(model, CPU)
    assert torch.equal(model[0].weight, before)


def test_tied_weights_stay_tied() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["embedding"].weight
    materialize(model, CPU)
    assert model["head"].weight is model["embedding"].weight
    assert len(list(model.parameters())) == 1


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class HalfMade(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("table", torch.ones(2, device="cpu"))


@pytest.mark.parametrize(
    ("kind", "said"), [(Scale, "it has no reset_parameters"), (HalfMade, "some of its tensors have values already")]
)
def test_what_cannot_be_made_is_refused_by_name(kind: type[nn.Module], said: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), kind())
    with pytest.raises(ConfigError, match=rf"1 \({kind.__name__}\) was made on the meta device.*{said}"):
        materialize(model, CPU)


def test_parameters_without_a_dimension_or_of_a_rare_type_stay_whole() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.bfloat16, bias=False), Scale())
    model.register_parameter("gain", nn.Parameter(torch.tensor(1.0)))
    assert set(unshardable(dict(model.named_parameters()))) == {"gain", "1.weight"}
    assert unshardable({}) == {}
