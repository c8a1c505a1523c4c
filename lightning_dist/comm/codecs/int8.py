"""Values in steps of their block's largest."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_dist.comm.codecs import blocks
from lightning_dist.comm.codecs.codec import saves
from lightning_dist.comm.codecs.dither import dither

BLOCK = 256
_LARGEST = 127
_LARGEST_STEP = torch.finfo(torch.float32).max / _LARGEST * (1 - 2**-23)  # so that the largest stays finite


@dataclass(frozen=True)
class Int8Codec:
    """Each block of 256 values in 255 even steps from minus to plus its largest magnitude; 1.016 bytes a value.

    Rounding to nearest is off by at most half a step. Stochastic rounding goes up with the probability that makes it
    right on average, and is off by less than a step.

    Attributes:
        rounding: ``nearest`` or ``stochastic``.
    """

    rounding: str = "nearest"
    wants_feedback: bool = True

    @property
    def name(self) -> str:
        """See :class:`Codec`."""
        return "int8" if self.rounding == "nearest" else "int8, rounded at random"

    def applies_to(self, dtype: torch.dtype) -> bool:
        """See :class:`Codec`."""
        return saves(dtype, 1 + 4 / BLOCK)

    def encoded_bytes(self, length: int) -> int:
        """See :class:`Codec`."""
        return blocks.bytes_with_numbers(length, blocks.num_blocks(length, BLOCK))

    def encode(self, values: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        """See :class:`Codec`."""
        rows, length = values.shape
        cut = blocks.padded(values, BLOCK)
        largest = torch.maximum(cut.amax(-1), cut.amin(-1).neg_())
        step = blocks.finite_or_nan(largest / _LARGEST).clamp_(max=_LARGEST_STEP)
        steps = cut / torch.where(step == 0, 1.0, step).unsqueeze(-1)
        if self.rounding == "stochastic":
            steps.add_(dither(steps.shape, seed, values.device)).floor_()
        else:
            steps.round_()
        # Not beyond the largest, where the step itself was rounded down; what a NaN becomes does not matter.
        levels = steps.nan_to_num_(0.0).clamp_(-_LARGEST, _LARGEST).to(torch.int8)
        return blocks.joined(step, levels.view(rows, cut.shape[1] * BLOCK)[:, :length])

    def decode(self, encoded: torch.Tensor, length: int) -> torch.Tensor:
        """See :class:`Codec`."""
        count = blocks.num_blocks(length, BLOCK)
        step, body = blocks.parted(encoded, count)
        levels = blocks.padded(body[:, :length].view(torch.int8), BLOCK)
        return (levels * step.unsqueeze(-1)).view(encoded.shape[0], count * BLOCK)[:, :length]
