"""Signs, and the mean magnitude of each block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from lightning_dist.comm.codecs import blocks
from lightning_dist.comm.codecs.codec import saves, typed

BLOCK = 256
# Eight bytes that are 0 or 1, read as one integer, times this: the top byte of the product has them as bits, the first
# as the lowest. No two of the 64 partial products meet, so nothing is carried.
_GATHER_BITS = 0x0102040810204080


@dataclass(frozen=True)
class OnebitCodec:
    """The sign of each value, times the mean magnitude of its block of 256; 0.141 bytes a value.

    The mean magnitude is the number that, times the signs, comes nearest to the values (1-bit SGD, Seide et al. 2014;
    with a mean a block, as 1-bit Adam, Tang et al. 2021). Zero counts as positive.
    """

    name: str = "onebit"
    wants_feedback: bool = True

    def applies_to(self, dtype: torch.dtype) -> bool:
        """See :class:`Codec`."""
        return saves(dtype, 1 / 8 + 4 / BLOCK)

    def encoded_bytes(self, length: int) -> int:
        """See :class:`Codec`."""
        return blocks.bytes_with_numbers(-(-length // 8), blocks.num_blocks(length, BLOCK))

    def encode(self, values: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        """See :class:`Codec`."""
        rows, length = values.shape
        cut = blocks.padded(values, BLOCK)
        mean = _means(cut, length)
        negative = typed((cut < 0).view(rows, cut.shape[1] * BLOCK), torch.int64)
        packed = (negative * _GATHER_BITS >> 56).to(torch.uint8)
        return blocks.joined(mean, packed[:, : -(-length // 8)])

    def decode(self, encoded: torch.Tensor, length: int) -> torch.Tensor:
        """See :class:`Codec`."""
        rows, count, packed_bytes = encoded.shape[0], blocks.num_blocks(length, BLOCK), -(-length // 8)
        mean, body = blocks.parted(encoded, count)
        packed = body[:, :packed_bytes].reshape(-1).int()
        signs = _signs_of_byte(encoded.device).index_select(0, packed).view(rows, 8 * packed_bytes)
        return (blocks.padded(signs, BLOCK) * mean.unsqueeze(-1)).view(rows, count * BLOCK)[:, :length]


def _means(cut: torch.Tensor, length: int) -> torch.Tensor:
    """Mean magnitudes [rows, blocks]; of the last block, of what is in it. Sums stay below fp32's largest."""
    mean = (cut.abs() / BLOCK).sum(-1)
    if length % BLOCK:
        mean[:, -1] *= BLOCK / (length % BLOCK)
    return blocks.finite_or_nan(mean)


@lru_cache(maxsize=16)
def _signs_of_byte(device: torch.device) -> torch.Tensor:
    """[256, 8]: the signs that a byte stands for."""
    byte = torch.arange(256).unsqueeze(1)
    return (1.0 - 2.0 * (byte >> torch.arange(8) & 1)).to(device)
