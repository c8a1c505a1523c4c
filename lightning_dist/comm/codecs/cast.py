"""Values in a narrower floating type."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_dist.comm.codecs.codec import saves, typed


@dataclass(frozen=True)
class CastCodec:
    """bfloat16: the range of fp32 with 8 bits of mantissa, rounded to nearest even; 2 bytes a value.

    A value beyond bfloat16's largest becomes infinite, as a cast makes it.
    """

    name: str = "bf16"
    wants_feedback: bool = False

    def applies_to(self, dtype: torch.dtype) -> bool:
        """See :class:`Codec`."""
        return saves(dtype, torch.bfloat16.itemsize)

    def encoded_bytes(self, length: int) -> int:
        """See :class:`Codec`."""
        return 4 * -(-length // 2)

    def encode(self, values: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        """See :class:`Codec`."""
        rows, length = values.shape
        narrow = torch.empty(rows, self.encoded_bytes(length) // 2, dtype=torch.bfloat16, device=values.device)
        narrow[:, :length].copy_(values)
        narrow[:, length:].zero_()
        return narrow.view(torch.uint8)

    def decode(self, encoded: torch.Tensor, length: int) -> torch.Tensor:
        """See :class:`Codec`."""
        return typed(encoded, torch.bfloat16)[:, :length].float()
