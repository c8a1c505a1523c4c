"""Recomputation together with torch.compile, alone and inside FSDP2 and DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from lightning_dist.config import RecomputeConfig
from lightning_dist.errors import ConfigError
from lightning_dist.parallel.recompute import Recomputation
from tests.support.ranks import RankContext, RankPool
from tests.support.sweeps import sampled
from tests.unit.parallel.recomputed import (
    BUDGET,
    FULL,
    MODES,
    OUTSIDE_BYTES,
    SELECTIVE,
    WIDTH,
    Net,
    assert_same,
    forward_rows,
    kept_bytes,
    make_net,
    recomputing,
    results,
    rows,
)

# -- torch.compile

# Dynamo looks at the gradient of every input it traces (torch 2.13).
tracing = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class Compilable(nn.Module):
    """Random masks, batch statistics, more kept than the products' results; nothing that breaks a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(torch.tanh(self.norm(torch.sin(self.up(x)))), 0.5)
        return x + functional.dropout(torch.sigmoid(self.down(x)), 0.3)


class Breaking(Compilable):
    """Breaks the trace in its middle, and writes to a buffer in a way of its own."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        self.count = self.count + 1
        return super().forward(x) * self.count


class Certain(Compilable):
    """Draws nothing: a compiled checkpoint keeps the generator's state (5 kB) for each mask."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sigmoid(self.down(torch.tanh(self.norm(torch.sin(self.up(x))))))


class InPlace(Compilable):
    """What an eager selective checkpoint refuses."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu_(self.up(x)))


def wrapped(model: Net) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="aot_eager")  # type: ignore[assignment]
    return model


def in_place(model: Net) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def as_a_whole(model: Net) -> nn.Module:
    return nn.Sequential(torch.compile(model, backend="aot_eager"))  # type: ignore[arg-type]


COMPILED = [
    pytest.param(how, options, id=f"{how.__name__}-{options.mode}")
    for how in (wrapped, in_place, as_a_whole)
    for options in (FULL, SELECTIVE, BUDGET)
    if (how, options) != (as_a_whole, BUDGET)
]


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # dynamo's progress bar would start a thread for good
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@tracing
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("how", "options", "block"),
    sampled(
        {
            f"{case.id}-{block.__name__}": (*case.values, block)
            for case in COMPILED
            for block in (Compilable, Breaking, InPlace)
        },
        [
            *(f"{case.id}-Compilable" for case in COMPILED),
            *("wrapped-full-Breaking", "in_place-budget-Breaking", "as_a_whole-selective-Breaking"),
            *("wrapped-budget-InPlace", "in_place-selective-InPlace", "as_a_whole-full-InPlace"),
        ],
    ),
)
def test_compiled_blocks_give_the_same(
    how: Callable[[Net], nn.Module], options: RecomputeConfig, block: type[nn.Module]
) -> None:
    expected = results(how(make_net(block)), forward_rows)
    model = how(make_net(block))
    names = list(model.state_dict())
    with recomputing(model, options):
        assert list(model.state_dict()) == names
        assert_same(results(model, forward_rows), expected)


@tracing
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("how", "options"), COMPILED)
def test_compiled_blocks_keep_less(how: Callable[[Net], nn.Module], options: RecomputeConfig) -> None:
    def kept(options: RecomputeConfig) -> int:
        model = how(make_net(Certain))
        with recomputing(model, options):
            model(rows())  # compiled here
            return kept_bytes(model)

    least, everything = kept(FULL), kept(RecomputeConfig())
    assert least <= kept(options) < everything
    assert (kept(options) > least) == (options is SELECTIVE)


@tracing
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("how", [wrapped, in_place])
def test_compiled_blocks_are_measured(how: Callable[[Net], nn.Module]) -> None:
    model = how(make_net(Compilable))
    recomputation = Recomputation(model, RecomputeConfig(mode="budget", budget=10**6))
    recomputation.attach()
    model(rows()).backward()
    choice = recomputation.settle()
    assert choice is not None
    assert choice.recomputed == ()
    model(rows())
    assert choice.kept_bytes + OUTSIDE_BYTES == kept_bytes(model)


@tracing
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("how", [wrapped, in_place])
def test_shapes_may_change(how: Callable[[Net], nn.Module]) -> None:
    def step(model: Any) -> Tensor:
        sizes = iter((4, 6, 4, 5, 9))
        return torch.stack([model(torch.ones(size, WIDTH)) for size in sizes]).sum()

    expected = results(how(make_net(Compilable)), step)
    model = how(make_net(Compilable))
    with recomputing(model, FULL):
        assert_same(results(model, step), expected)


def test_what_is_compiled_as_a_whole_cannot_be_measured() -> None:
    with pytest.raises(
        ConfigError, match=r"cannot measure 0\._orig_mod\.blocks\.0: it is part of 0, which is compiled"
    ):
        Recomputation(as_a_whole(make_net()), BUDGET)
    model = make_net()
    model.compile(backend="aot_eager")
    with pytest.raises(ConfigError, match="it is part of the model, which is compiled"):
        Recomputation(model, BUDGET)


# -- compiled blocks inside FSDP2 and DDP, on two ranks


def sharded(model: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return model


def replicated(model: Net) -> nn.Module:
    return DistributedDataParallel(model)


def static(model: Net) -> nn.Module:
    return DistributedDataParallel(model, static_graph=True)


def own_rows(model: Any) -> Tensor:
    return model(rows(torch.distributed.get_rank()))


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def measured_bytes(compile_blocks: Callable[[Net], nn.Module]) -> int:
    """What the blocks keep by the measure of a model that is not distributed."""
    torch._dynamo.reset()
    model = make_net(Compilable)
    compile_blocks(model)
    with recomputing(model, BUDGET) as recomputation:
        model(rows()).backward()
        choice = recomputation.settle()
    assert choice is not None
    return choice.kept_bytes


def compare(
    _: RankContext, distribute: Callable[[Net], nn.Module], compile_blocks: Callable[[Net], nn.Module]
) -> list[str]:
    """What differs, over modes and both orders of attaching and distributing."""
    problems: list[str] = []
    kept = 0

    def run(options: RecomputeConfig, *, attach_first: bool) -> dict[str, Tensor]:
        torch._dynamo.reset()
        net = make_net(Compilable)
        compile_blocks(net)
        distributed = None if attach_first else distribute(net)
        with recomputing(net, options) as recomputation:
            model = distributed or distribute(net)
            left = {name: whole(tensor) for name, tensor in results(model, own_rows).items()}
            choice = recomputation.settle()
        if choice is not None and choice.kept_bytes != kept:
            problems.append(f"{choice.kept_bytes} bytes were measured, not {kept}")
        return left

    expected = run(RecomputeConfig(), attach_first=True)
    kept = measured_bytes(compile_blocks)
    for options in MODES.values():
        for attach_first in (True, False):
            left = run(options, attach_first=attach_first)
            wrong = [name for name in expected if not torch.equal(left[name], expected[name])]
            problems += [f"{options.mode} {attach_first=}: {name}" for name in wrong]
    return problems


@pytest.mark.parametrize(
    ("distribute", "compile_blocks"),
    [
        (sharded, in_place),
        pytest.param(replicated, wrapped, marks=pytest.mark.sweep),
        pytest.param(static, in_place, marks=pytest.mark.sweep),
    ],
)
def test_distributed(
    ranks: RankPool, distribute: Callable[[Net], nn.Module], compile_blocks: Callable[[Net], nn.Module]
) -> None:
    # Fresh ranks: torch's caches keep FSDP2's groups, and dynamo a thread.
    for problems in ranks.run(compare, world_size=2, args=(distribute, compile_blocks), fresh=True, deadline_s=100):
        assert problems == []
