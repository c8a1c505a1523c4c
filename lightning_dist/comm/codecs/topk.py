"""The largest values, and where they are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lightning_dist.comm.codecs.codec import saves, typed

_LONG = 1 << 14
_STRIDE = 61  # a prime: no shape of a layer repeats with it
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
        places = _places_of_largest(values, kept)
        chosen = values.gather(1, places)
        chosen = chosen + chosen * 0  # an infinity becomes NaN
        return torch.cat([chosen.view(torch.int32), places.int()], dim=1).view(torch.uint8)

    def decode(self, encoded: torch.Tensor, length: int) -> torch.Tensor:
        """See :class:`Codec`."""
        cut = 4 * self.kept(length)
        values, places = typed(encoded[:, :cut], torch.float32), typed(encoded[:, cut:], torch.int32)
        out = torch.zeros(encoded.shape[0], length, device=encoded.device)
        return out.scatter_(1, places.long(), values)


def _places_of_largest(values: torch.Tensor, kept: int) -> torch.Tensor:
    """[rows, kept]: where the largest magnitudes are; a NaN counts as the largest."""
    magnitudes = values.abs()
    if values.is_cuda or values.shape[1] < _LONG or not len(values):
        return torch.topk(magnitudes, kept, dim=1, sorted=False).indices
    return torch.stack([_places_above_a_threshold(row, kept) for row in magnitudes])


def _places_above_a_threshold(magnitudes: torch.Tensor, kept: int) -> torch.Tensor:
    """The same of one long row on a CPU, where few candidates are looked at closely.

    A sample says which magnitude about half as many again as are wanted exceed; of those the largest are taken. If the
    sample misleads, there are fewer, and all are looked at. Either way the result is exact.
    """
    sample = magnitudes[::_STRIDE]
    expected = kept / _STRIDE
    taken = min(len(sample), math.ceil(1.25 * expected + 4 * math.sqrt(expected) + 1))
    threshold = torch.topk(sample, taken, sorted=False).values.min()
    candidates = (magnitudes < threshold).logical_not_().nonzero().view(-1)  # a NaN is one
    if len(candidates) < kept:
        return torch.topk(magnitudes, kept, sorted=False).indices
    return candidates[torch.topk(magnitudes[candidates], kept, sorted=False).indices]
