"""Bytes of activations that a GPT keeps from forward to backward, in closed form. Pure.

What is assumed: the usual pre-norm decoder (norm, one matrix for q, k and v, attention, output matrix; norm, matrix up,
GELU, matrix down; a residual sum after each half), biases anywhere, whose autograd keeps each tensor once. Counted as
in Korthikanti et al., "Reducing activation recomputation in large transformer models", MLSys 2023, but for any width
of a value, and with attention that keeps no scores (``scaled_dot_product_attention`` by a flash kernel). Of b sequences
of s tokens and width h, at c bytes a value, one block keeps

- 2 sbh of the residual stream (input of each norm) and 2 sbh of norms' outputs (input of the next matrix),
- 3 sbh of q, k and v, and sbh of what attention gives,
- 2 sbm of an MLP of width m (input and output of GELU), 8 sbh at the usual m = 4h,

together 16 sbh values: 32 sbh bytes in 16 bit, 64 sbh in 32 bit. In 16 bit, two dropout masks of a byte a value make
it Korthikanti's 34 sbh. Under autocast the residual stream stays in 32 bit, which gives 36 sbh. Means and deviations of
norms and the log-sum-exp of attention, in fp32, are counted too. Not counted: what a block holds only while it
computes, and what the caller keeps (the batch, logged values). ``torch.compile`` may keep less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lightning_dist.errors import ConfigError, unknown_option

RECOMPUTE_CHOICES = ("off", "selective", "full")
_FP32 = 4


class ValueBytes(NamedTuple):
    """Bytes a value.

    Attributes:
        compute: What matrices take and give.
        residual: The residual stream.
        loss: Logarithms of probabilities.
    """

    compute: int
    residual: int
    loss: int


VALUE_BYTES: dict[str, ValueBytes] = {
    "32-true": ValueBytes(4, 4, 4),
    "bf16-true": ValueBytes(2, 2, 2),
    "bf16-mixed": ValueBytes(2, 4, 4),
    "16-mixed": ValueBytes(2, 4, 4),
}
"""By Lightning's name of a precision. Where FSDP2 casts parameters and inputs to bf16, ``bf16-true`` comes closest."""


@dataclass(frozen=True)
class Activations:
    """Bytes of activations of one micro-batch on one rank.

    Attributes:
        per_block: Kept by one block from its forward to its backward.
        recomputed: Besides that, held by a block while it is in backward, because it is made again.
        outside: Kept outside of blocks from forward to backward.
        loss: Besides that, held while the loss and its gradient are computed.
    """

    per_block: int = 0
    recomputed: int = 0
    outside: int = 0
    loss: int = 0


@dataclass(frozen=True, kw_only=True)
class GPTShape:
    """Sizes of a GPT and its micro-batch on one rank.

    Attributes:
        batch: b, sequences.
        sequence: s, tokens.
        width: h.
        heads: a.
        mlp_width: m; 4h if not given.
        vocabulary: v, tokens.
    """

    batch: int
    sequence: int
    width: int
    heads: int
    vocabulary: int
    mlp_width: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "sequence", "width", "heads", "vocabulary", "mlp_width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.width % self.heads:
            raise ConfigError(f"heads={self.heads} must divide width={self.width}")


def gpt_activations(
    shape: GPTShape,
    *,
    precision: str = "32-true",
    recompute: str = "off",
    tp: int = 1,
    dropout_mask_bytes: int = 0,
    keeps_scores: bool = False,
) -> Activations:
    """Activations of a GPT.

    Args:
        shape: Sizes.
        precision: Lightning's name.
        recompute: ``off``; ``full``: a block keeps its input only and is computed again in its backward;
            ``selective``: it keeps its input and what matrix products and attention give, and computes the rest again
            (as :class:`~lightning_dist.config.RecomputeConfig` has it; Korthikanti's selective recomputation, that of
            scores, is what attention without ``keeps_scores`` does).
        tp: Ranks that share each block: they share what lies between the two matrices of attention and of the MLP, and
            each holds the rest (no sequence parallelism; the head is not shared).
        dropout_mask_bytes: Bytes a value of a dropout mask: 0 without dropout, 1 on CUDA, those of a value on CPU.
        keeps_scores: Attention is not by a flash kernel and keeps its scores. On CPU that is so with dropout.

    Raises:
        UnknownOptionError: Of ``precision`` or ``recompute``.
        ConfigError: ``tp`` does not divide the heads.
    """
    if precision not in VALUE_BYTES:
        raise unknown_option("precision", precision, VALUE_BYTES)
    if recompute not in RECOMPUTE_CHOICES:
        raise unknown_option("recompute", recompute, RECOMPUTE_CHOICES)
    if tp < 1 or shape.heads % tp:
        raise ConfigError(f"tp={tp} must divide heads={shape.heads}")
    value = VALUE_BYTES[precision]
    tokens = shape.batch * shape.sequence
    mlp_width = shape.mlp_width or 4 * shape.width
    width_bytes = tokens * shape.width * value.compute
    mlp_bytes = tokens * mlp_width * value.compute // tp
    block_input = tokens * shape.width * value.residual
    log_sums = 0 if keeps_scores else shape.heads * tokens * _FP32 // tp
    # of q, k, v, attention and the matrix up: kept whether or not the rest is computed again
    products = 4 * width_bytes // tp + mlp_bytes + log_sums
    rest = block_input + 2 * (width_bytes + tokens * shape.width * dropout_mask_bytes) + mlp_bytes + 4 * tokens * _FP32
    if keeps_scores:
        rest += _score_bytes(shape, value.compute, dropout_mask_bytes) // tp
    everything = block_input + products + rest
    raw_scores = _score_bytes(shape, value.compute, 0) // tp if keeps_scores else 0
    kept, recomputed = {
        "off": (everything, 0),
        "selective": (block_input + products + 2 * width_bytes + raw_scores, rest),
        "full": (block_input, everything - block_input),
    }[recompute]
    return Activations(
        per_block=kept,
        recomputed=recomputed,
        outside=tokens * (shape.width * (value.residual + value.compute) + 2 * _FP32 + shape.vocabulary * value.loss),
        loss=tokens * shape.vocabulary * (value.compute + (value.loss if value.loss != value.compute else 0)),
    )


def _score_bytes(shape: GPTShape, compute: int, mask_bytes: int) -> int:
    """The softmax's output and, with dropout, its mask and what is left: 5as/h of Korthikanti's formula."""
    values = shape.heads * shape.batch * shape.sequence**2
    return values * (compute + (compute + mask_bytes if mask_bytes else 0))
