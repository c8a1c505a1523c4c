"""The largest values, and where they are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lightning_dist.comm.codecs.codec import saves, typed

_PAIR_BYTES = 8  # an fp32 value and an int32 index


@dataclass(frozen=True)
class TopkCodec:
    """A share of each row's values, those of the largest magnitude, with their places; 8 bytes each, the rest is zero.

    (Deep Gradient Compression, Lin et al. 2018.) A row that has a NaN or an infinity sends it before any other value.

    Attributes:
        ratio: The share, in (0, 0.5); at least one value of a row goes.
    """

    ratio: float = 0.01
    wants_feedback: bool = True

    @property
    def name(self) -> str:
        """See :class:`Codec`."""
        return f"the largest {self.ratio:.3g} of values"

    def applies_to(self, dtype: torch.dtype) -> bool:
        """See :class:`Codec`."""
        return saves(dtype, _PAIR_BYTES * self.ratio)

    def kept(self, length: int) -> int:
        """How many of ``length`` values go."""
        return min(length, max(1, math.ceil(length * self.ratio))) if length else 0

    def encoded_bytes(self, length: int) -> int:
        """See :class:`Codec`."""
        return _PAIR_BYTES * self.kept(length)

    def encode(self, values: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        """See :class:`Codec`."""
        kept = self.kept(values.shape[1])
        places = torch.topk(values.abs(), kept, dim=1, sorted=False).indices  # a NaN counts as the largest
        chosen = values.gather(1, places)
        chosen = chosen + chosen * 0  # an infinity becomes NaN
        return torch.cat([chosen.view(torch.int32), places.int()], dim=1).view(torch.uint8)

    def decode(self, encoded: torch.Tensor, length: int) -> torch.Tensor:
        """See :class:`Codec`."""
        cut = 4 * self.kept(length)
        values, places = typed(encoded[:, :cut], torch.float32), typed(encoded[:, cut:], torch.int32)
        out = torch.zeros(encoded.shape[0], length, device=encoded.device)
        return out.scatter_(1, places.long(), values)
