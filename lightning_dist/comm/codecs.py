"""What crosses the slow leg: how a part is encoded for the network.

A codec says how many bytes a value costs on the wire, and turns values into what is sent and back. Sums are taken in
fp32 on decoded values and rounded once, so that the error does not grow with the number of hosts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_dist.errors import unknown_option


@dataclass(frozen=True)
class CastCodec:
    """Values cross in a narrower floating type.

    Attributes:
        name: Its name in the config.
        wire_dtype: What is sent.
    """

    name: str
    wire_dtype: torch.dtype

    @property
    def bytes_per_value(self) -> float:
        """Bytes on the wire for each value."""
        return self.wire_dtype.itemsize

    def applies_to(self, dtype: torch.dtype) -> bool:
        """Whether tensors of this type get smaller by it; the others cross as they are."""
        return dtype.is_floating_point and dtype.itemsize > self.wire_dtype.itemsize

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write ``values`` [n] into ``out`` [n] of the wire's type, rounding to nearest even."""
        out.copy_(values)

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        """Write ``encoded`` [n] into ``out`` [n] of the values' type; exact."""
        out.copy_(encoded)


CODECS: dict[str, CastCodec | None] = {"same": None, "bf16": CastCodec("bf16", torch.bfloat16)}


def codec_of(wire_dtype: str) -> CastCodec | None:
    """The codec of a ``sync.wire_dtype``; ``None`` sends values as they are."""
    if wire_dtype not in CODECS:
        raise unknown_option("sync.wire_dtype", wire_dtype, CODECS)
    return CODECS[wire_dtype]
