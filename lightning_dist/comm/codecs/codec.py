"""What a codec is.

Note [Rows]
    Values come as rows, each of which goes to another rank. A row is encoded by itself, all rows in one call: there is
    no loop over rows or blocks, and the same code runs on CPU and CUDA without a synchronisation.

Note [Values that are not finite]
    An infinity or a NaN arrives as one that is not finite, and with int8 and onebit so does all of its block: whoever
    looks for non-finite gradients, on any rank, still finds one. Finite values stay finite, up to the largest of fp32
    (bf16: of bfloat16, which is 0.4 % less).
"""

from __future__ import annotations

from typing import Protocol

import torch


class Codec(Protocol):
    """How values become bytes, and bytes values."""

    @property
    def name(self) -> str:
        """Its name in the config, with what else says how it rounds."""

    @property
    def wants_feedback(self) -> bool:
        """Whether what it loses is so much that it is to be added to what is sent next."""

    def applies_to(self, dtype: torch.dtype) -> bool:
        """Whether tensors of this type get smaller by it; the others cross as they are."""

    def encoded_bytes(self, length: int) -> int:
        """Bytes of ``length`` values; a multiple of 4, so that rows of bytes lie where numbers may."""

    def encode(self, values: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        """Values as bytes.

        Args:
            values: [rows, n] fp32.
            seed: What random rounding draws from: the same values and seed give the same bytes.

        Returns:
            [rows, encoded_bytes(n)] uint8, contiguous.
        """

    def decode(self, encoded: torch.Tensor, length: int) -> torch.Tensor:
        """Bytes as values; the same values on every rank.

        Args:
            encoded: [rows, encoded_bytes(n)] uint8, contiguous.
            length: n.

        Returns:
            [rows, n] fp32.
        """


def saves(dtype: torch.dtype, bytes_per_value: float) -> bool:
    """Whether values of a type take more than this."""
    return dtype.is_floating_point and dtype.itemsize > bytes_per_value


def typed(encoded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes [rows, m] as numbers of a type; a view, but of no bytes, which torch does not view as larger ones."""
    if encoded.numel() == 0:
        return encoded.new_empty(encoded.shape[0], encoded.shape[1] // dtype.itemsize, dtype=dtype)
    return encoded.view(dtype)


def store(values: torch.Tensor, out: torch.Tensor) -> None:
    """Write decoded values into ``out``, of the same shape and any floating type; what is finite stays finite there."""
    if out.dtype is torch.float16:
        limit = torch.finfo(torch.float16).max
        values = values.clamp(-limit, limit)  # a NaN stays one
    out.copy_(values)
