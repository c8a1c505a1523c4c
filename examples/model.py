"""The models of the examples: a byte-level GPT and a stack of MLP blocks, as LightningModules.

The GPT is the usual pre-norm decoder: learned positions, causal attention, GELU, the output layer tied to the
embedding.
"""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everybody uses

from lightning_dist import PipelineLayer
from lightning_dist.run_config import AdamWConfig, GPTConfig, MLPConfig, SGDConfig


class Attention(nn.Module):
    """Causal self-attention of several heads. (batch, time, n_embd) -> the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.out = nn.Linear(config.n_embd, config.n_embd)
        self.out_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = (x.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for x in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(*heads, dropout_p=dropout, is_causal=True)
        return self.out_dropout(self.out(y.transpose(1, 2).flatten(-2)))


class Block(nn.Module):
    """Attention, then an MLP, each on a normalised input and added to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.n_embd)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.n_embd)
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Logits of the next byte at each position. (batch, time) of int64 -> (batch, time, vocab_size)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.block_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.apply(_init)
        self.head.weight = self.tokens.weight
        for block in self.blocks:  # as in GPT-2: the sum over layers keeps its variance
            for layer in (block.attention.out, block.down):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * config.n_layer))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(x)

    def embed(self, tokens: Tensor) -> Tensor:
        """What goes into the first block."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.tokens(tokens) + self.positions(positions))

    def logits(self, x: Tensor) -> Tensor:
        """What becomes of the last block's output."""
        return self.head(self.norm(x))

    def pipeline_layers(self) -> list[nn.Module | PipelineLayer]:
        """How it splits into pipeline stages."""
        embed = PipelineLayer(self.embed, self.tokens, self.positions, self.dropout)
        return [embed, *self.blocks, PipelineLayer(self.logits, self.norm, self.head)]

    @torch.no_grad()
    def continue_text(self, prompt: bytes, *, num_bytes: int, temperature: float, seed: int) -> bytes:
        """Continue a prompt byte by byte; temperature 0 takes the likeliest byte each time."""
        device = self.tokens.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        tokens = torch.tensor([list(prompt) or [0]], device=device)
        was_training = self.training
        self.eval()
        for _ in range(num_bytes):
            logits = self(tokens[:, -self.config.block_size :])[:, -1]
            if temperature > 0:
                chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                chosen = logits.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, chosen], dim=1)
        self.train(was_training)
        return bytes(token % 256 for token in tokens[0, -num_bytes:].tolist()) if num_bytes else b""


class Residual(nn.Sequential):
    """Adds what its layers make of the input to it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class MLP(nn.Module):
    """Residual blocks of [n_features -> n_hidden -> n_features]. (batch, n_features) -> the same."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Residual(
                nn.Linear(config.n_features, config.n_hidden), nn.GELU(), nn.Linear(config.n_hidden, config.n_features)
            )
            for _ in range(config.n_layer)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def pipeline_layers(self) -> list[nn.Module]:
        """How it splits into pipeline stages."""
        return list(self.blocks)


class Learner(pl.LightningModule):
    """A model, its loss and its optimizer.

    Logs ``train_loss`` and ``val_loss``; for the GPT also ``train_bits_per_byte`` and ``val_bits_per_byte`` (the loss
    in bits rather than nats).

    Args:
        model: Which model to make.
        optimizer: Which optimizer and learning rates.
        max_steps: Optimizer steps over which the learning rate is planned.
    """

    def __init__(self, model: GPTConfig | MLPConfig, optimizer: AdamWConfig | SGDConfig, *, max_steps: int) -> None:
        super().__init__()
        self.optimizer_config = optimizer
        self.max_steps = max_steps
        self.is_text = isinstance(model, GPTConfig)
        self.model: nn.Module = GPT(model) if isinstance(model, GPTConfig) else MLP(model)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def pipeline_layers(self) -> Any:
        """The model's."""
        return self.model.pipeline_layers()  # type: ignore[operator]  # both models have it

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self._loss("train", batch, sync_dist=False)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self._loss("val", batch, sync_dist=True)

    def _loss(self, stage: str, batch: tuple[Tensor, Tensor], *, sync_dist: bool) -> Tensor:
        inputs, targets = batch
        outputs = self(inputs)
        if self.is_text:
            loss = F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
            bits = loss.detach() / math.log(2)
            self.log(f"{stage}_bits_per_byte", bits, sync_dist=sync_dist, batch_size=len(inputs))
        else:
            loss = F.mse_loss(outputs, targets)
        self.log(f"{stage}_loss", loss, prog_bar=True, sync_dist=sync_dist, batch_size=len(inputs))
        return loss

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[dict[str, object]]]:
        config = self.optimizer_config
        optimizer: torch.optim.Optimizer
        if isinstance(config, AdamWConfig):
            optimizer = torch.optim.AdamW(
                _decay_groups(self.model, config.weight_decay),
                lr=config.lr,
                betas=(config.beta1, config.beta2),
                eps=config.eps,
            )
        else:
            optimizer = torch.optim.SGD(
                self.parameters(),
                lr=config.lr,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
                nesterov=config.nesterov,
            )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def _rate(self, step: int) -> float:
        """Learning rate of a step over the peak: a linear rise, then constant or a cosine."""
        config = self.optimizer_config
        if step < config.warmup_steps:
            return (step + 1) / (config.warmup_steps + 1)
        if config.schedule == "constant":
            return 1.0
        done = (step - config.warmup_steps) / max(1, self.max_steps - config.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine


def _decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Weight decay for matrices only: not for biases, norms and embeddings (nor the output layer tied to one)."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decayed = [p for p in model.parameters() if p.dim() >= 2 and id(p) not in embeddings]
    rest = [p for p in model.parameters() if p.dim() < 2 or id(p) in embeddings]
    return [
        {"params": group, "weight_decay": decay} for group, decay in ((decayed, weight_decay), (rest, 0.0)) if group
    ]


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
