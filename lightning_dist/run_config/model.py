"""What is trained."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.errors import ConfigError
from lightning_dist.run_config.checks import check_choice, check_number

MODEL_KINDS = ("gpt", "mlp")


@dataclass(frozen=True)
class GPTConfig:
    """A GPT over bytes.

    Attributes:
        kind: ``gpt``.
        vocab_size: Number of tokens; 256 for bytes.
        block_size: Longest context, in tokens.
        n_layer: Transformer blocks.
        n_head: Attention heads; must divide ``n_embd``.
        n_embd: Width.
        dropout: Probability, 0 up to but not including 1.
    """

    kind: str = "gpt"
    vocab_size: int = 256
    block_size: int = 128
    n_layer: int = 6
    n_head: int = 6
    n_embd: int = 384
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_choice("model.kind", self.kind, ("gpt",))
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            check_number(f"model.{name}", getattr(self, name), low=1, whole=True)
        check_number("model.dropout", self.dropout, low=0, below=1)
        if self.n_embd % self.n_head:
            heads = [n for n in range(1, self.n_embd + 1) if self.n_embd % n == 0]
            raise ConfigError(
                f"model.n_head={self.n_head} must divide model.n_embd={self.n_embd}; "
                f"the closest that does is model.n_head={min(heads, key=lambda n: abs(n - self.n_head))}"
            )


@dataclass(frozen=True)
class MLPConfig:
    """A stack of ``[n_features -> n_hidden -> n_features]`` blocks.

    Attributes:
        kind: ``mlp``.
        n_layer: Blocks.
        n_features: Width of input and output.
        n_hidden: Width inside a block.
    """

    kind: str = "mlp"
    n_layer: int = 6
    n_features: int = 768
    n_hidden: int = 3072

    def __post_init__(self) -> None:
        check_choice("model.kind", self.kind, ("mlp",))
        for name in ("n_layer", "n_features", "n_hidden"):
            check_number(f"model.{name}", getattr(self, name), low=1, whole=True)
