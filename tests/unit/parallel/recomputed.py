"""Models whose blocks do whatever a block may do, and what a few steps of training leave behind."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from lightning_dist.config import RecomputeConfig
from lightning_dist.parallel.recompute import Recomputation

WIDTH, BATCH = 8, 4
ROW_BYTES = BATCH * WIDTH * 4
OUTSIDE_BYTES = 2 * ROW_BYTES + BATCH * 4  # what a Net keeps beside its blocks: two inputs, and an output to square
FULL = RecomputeConfig(mode="full")
EVERY_2 = RecomputeConfig(mode="every_n", every=2)
SELECTIVE = RecomputeConfig(mode="selective")
BUDGET = RecomputeConfig(mode="budget", budget=2048)
MODES = {options.mode: options for options in (FULL, EVERY_2, SELECTIVE, BUDGET)}


class Block(nn.Module):
    """What a block of a test is made of, and how often it ran. Keeps one row inside: the output of its ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.runs = 0
        self.inner: weakref.ref[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        hidden = torch.relu(self.up(x))
        self.inner = weakref.ref(hidden)
        return x + self.down(hidden)


class DropoutBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + functional.dropout(self.down(functional.dropout(torch.relu(self.up(x)), 0.5)), 0.3)


class AttentionBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        heads = self.up(x).view(1, BATCH, 2, WIDTH // 2).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return x + functional.dropout(self.down(attended.transpose(1, 2).reshape(BATCH, WIDTH)), 0.5)


class AttentionDropoutBlock(Block):
    """Attention that draws random numbers, and a dropout after it."""

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        heads = self.up(x).view(1, BATCH, 2, WIDTH // 2).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)
        return x + functional.dropout(self.down(attended.transpose(1, 2).reshape(BATCH, WIDTH)), 0.5)


class BatchNormBlock(Block):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + self.down(torch.relu(self.norm(self.up(x))))


class CumulativeNormBlock(BatchNormBlock):
    def __init__(self) -> None:
        super().__init__(momentum=None)


class SpectralNormBlock(Block):
    """A buffer that is written in forward and that the output depends on."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.up)


class CountingBlock(Block):
    """A buffer that is replaced in forward."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return super().forward(x) * self.count


class ViewBlock(Block):
    """Returns a view of its result, from a view of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(1, BATCH, WIDTH)[0]).view(2, BATCH // 2, WIDTH).flatten(0, 1)[:]


class IdentityBlock(Block):
    """Returns its input, and what it made of it is lost."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return x


class ConvolutionBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(self.convolution(x.unsqueeze(1)).squeeze(1)))


class InPlaceBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.down(functional.silu(self.up(x)).mul_(2.0)).add_(x)


class Net(nn.Module):
    """An input layer, four blocks, an output layer."""

    def __init__(self, make: Callable[[], nn.Module] = Block, count: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(count))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()

    @property
    def runs(self) -> list[int]:
        return [block.runs for block in self.blocks]


def make_net(make: Callable[[], nn.Module] = Block, count: int = 4) -> Net:
    torch.manual_seed(7)
    return Net(make, count)


def rows(seed: int = 1) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))


@contextmanager
def recomputing(model: nn.Module, options: RecomputeConfig) -> Iterator[Recomputation]:
    recomputation = Recomputation(model, options)
    recomputation.attach()
    yield recomputation
    recomputation.release()


Step = Callable[[Any], Tensor]


def results(model: nn.Module, step: Step, *, steps: int = 2) -> dict[str, Tensor]:
    """Everything a few steps leave behind: losses, gradients, parameters, buffers, the state of the generator."""
    left: dict[str, Tensor] = {}
    torch.manual_seed(3)
    for index in range(steps):
        model.zero_grad()
        loss = step(model)
        loss.backward()
        left[f"loss {index}"] = loss.detach()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                left[f"gradient {index} of {name}"] = parameter.grad.clone()
                parameter.data.add_(parameter.grad, alpha=-0.1)
    left["random state"] = torch.get_rng_state()
    return left | {name: value.clone() for name, value in model.state_dict().items()}


def forward_rows(model: Any) -> Tensor:
    return model(rows())


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert list(left) == list(right)
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def check_same(model: nn.Module, options: RecomputeConfig, step: Step = forward_rows, *, steps: int = 2) -> None:
    """Steps with and without recomputation leave the same, bit for bit."""
    expected = results(copy.deepcopy(model), step, steps=steps)
    with recomputing(model, options):
        assert_same(results(model, step, steps=steps), expected)


def kept_bytes(model: Net) -> int:
    """Distinct bytes that one forward keeps, of recomputed blocks their inputs, without parameters and buffers."""
    owned = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}  # holding them keeps their addresses apart

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in owned:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(rows())
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
