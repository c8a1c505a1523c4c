"""Models to split, and what the tests of tensor parallelism do with them on a rank and in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812  # the name everybody uses

from examples.model import GPT, MLP
from lightning_dist.parallel.full_tensors import StateDictHooks
from lightning_dist.parallel.tensor import PlacedMesh, TensorParallel, make_mesh
from lightning_dist.parallel.tensor.part_tensors import PartTensors
from lightning_dist.run_config import GPTConfig, MLPConfig
from lightning_dist.topology import Axes, Cluster, Layout
from tests.support.tasks import RankContext

VOCABULARY = 24
TIME = 6
BATCH = 4


def make_gpt(dropout: float = 0.0) -> GPT:
    """4 heads of 3 features, so that 4 ranks have one each; the output layer is tied to the embedding."""
    model = GPT(GPTConfig(vocab_size=VOCABULARY, block_size=TIME, n_layer=2, n_head=4, n_embd=12, dropout=dropout))
    return spread(model)


def whole_gpt(seed: int = 0) -> GPT:
    """The model that a rank makes whose generator has this seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make_gpt()


def make_mlp() -> MLP:
    """Odd sizes: 7 features, and 9 inside, 3 on each of 3 ranks."""
    return spread(MLP(MLPConfig(n_layer=2, n_features=7, n_hidden=9)))


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class GroupedAttention(nn.Module):
    """As Hugging Face's decoders have it: 4 query heads, 2 key and value heads, norms of each head's query and key."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.head_dim = 3
        self.q_proj = nn.Linear(width, 12, bias=False)
        self.k_proj = nn.Linear(width, 6, bias=False)
        self.v_proj = nn.Linear(width, 6)
        self.o_proj = nn.Linear(12, width)
        self.q_norm = RMSNorm(3)
        self.k_norm = RMSNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2).repeat_interleave(2, 1)
        v = self.v_proj(x).view(shape).transpose(1, 2).repeat_interleave(2, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


class GatedMLP(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, 10, bias=False)
        self.up_proj = nn.Linear(width, 10, bias=False)
        self.down_proj = nn.Linear(10, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = GroupedAttention()
        self.mlp = GatedMLP()
        self.input_layernorm = RMSNorm(12)
        self.post_attention_layernorm = RMSNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """A decoder with Hugging Face's names, an embedding that is not tied, and a padding token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, 12, padding_idx=5)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.norm = RMSNorm(12)
        self.lm_head = nn.Linear(12, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def make_decoder() -> Decoder:
    return spread(Decoder())


def spread(model: Any) -> Any:
    """Values of the size of 1, biases too, so that what is lost or counted twice shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    return model


def make_noisy_gpt() -> GPT:
    return make_gpt(dropout=0.3)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": make_gpt,
    "noisy": make_noisy_gpt,
    "mlp": make_mlp,
    "huggingface": make_decoder,
}


def make_batches(kind: str, number: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Any]:
    """(inputs, targets); tokens for the text models, of which one target in a few is to be ignored."""
    generator = torch.Generator().manual_seed(seed)
    batches: list[Any] = []
    for _ in range(number):
        if kind == "mlp":
            batches.append(tuple(torch.randn(BATCH, 7, generator=generator).to(dtype) for _ in range(2)))
            continue
        inputs, targets = (torch.randint(VOCABULARY, (BATCH, TIME), generator=generator) for _ in range(2))
        targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
        batches.append((inputs, targets))
    return batches


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    outputs = model(inputs)
    if targets.is_floating_point():
        return F.mse_loss(outputs, targets)
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    """SGD, or AdamW in one of its implementations.

    AdamW divides by the root of the squared gradient; with a small eps it would enlarge rounding where that is 0.
    """
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
    lists = {name: True} if name in ("foreach", "fused") else {}
    return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-3, weight_decay=0.1, **lists)


@contextlib.contextmanager
def placed_mesh(context: RankContext, axes: Mapping[str, int], *, timeout_s: float = 30.0) -> Iterator[PlacedMesh]:
    """The mesh of the call's own placement, its groups destroyed at the end."""
    hosts = [seat.host for seat in context.placement.seats()]
    layout = Layout.place(Cluster(tuple(hosts)), Axes(**axes))
    placed = make_mesh(layout, rank=context.rank, device_type="cpu", timeout_s=timeout_s)
    try:
        yield placed
    finally:
        placed.close()


def disturbed(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Other values than the group's first rank's on all other ranks, which must not matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(float(mesh.get_local_rank()))
    return model


def whole_tensors(parallel: TensorParallel) -> PartTensors:
    """Outside of a strategy's seam."""
    return PartTensors(parallel, lambda name: contextlib.nullcontext())


@dataclass(frozen=True)
class RunResult:
    """What training left on a rank.

    Attributes:
        losses: Of each step.
        weights: Whole, by name.
        optimizer_state: Whole, by name.
    """

    losses: list[float]
    weights: dict[str, Any]
    optimizer_state: dict[str, dict[str, Any]]

    @classmethod
    def of(
        cls, losses: list[float], parallel: TensorParallel, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> RunResult:
        tensors = whole_tensors(parallel)
        hooks = StateDictHooks(model, tensors)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        hooks.release()
        names = [name for name, _ in model.named_parameters()]
        states = tensors.optimizer_state(optimizer, keep=True)["state"]
        return cls(losses, weights, {names[index]: dict(entries) for index, entries in states.items()})


def whole_gradients(parallel: TensorParallel, model: nn.Module) -> dict[str, Tensor]:
    """By name."""
    tensors = whole_tensors(parallel)
    return {
        name: (tensors.whole(p, p.grad) if isinstance(p.grad, DTensor) else p.grad).clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
