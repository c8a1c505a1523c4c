"""What random rounding draws from: the same numbers for the same seed, wherever and whenever they are drawn.

Note [Random numbers by a counter]
    Number i of seed s is ``frac(table[i] + shift(s))``: a fixed table of uniform numbers, shifted around the unit
    circle by a hash of the seed (Cranley and Patterson 1976). Over seeds each number is uniform, so that rounding is
    right on average for every value; neighbours are as independent as the table's. It costs an addition a value, a
    tenth of drawing them anew, and a device needs no generator whose state would have to be saved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_TABLE_SEED = 0x5EED
_SMALLEST_TABLE = 1 << 16
_tables: dict[torch.device, torch.Tensor] = {}  # constants: a longer one begins as a shorter one does


def dither(shape: Sequence[int], seed: int, device: torch.device) -> torch.Tensor:
    """Uniform numbers in [0, 1) of a shape."""
    length = torch.Size(shape).numel()
    return (_table(length, device)[:length] + shift(seed)).frac_().view(*shape)


def seed_of(*counters: int) -> int:
    """A seed of a few counters, such as step, place and rank; another for each choice of them."""
    seed = 0
    for counter in counters:
        seed = _mixed(seed ^ counter & _MASK)
    return seed


def shift(seed: int) -> float:
    """A uniform number in [0, 1) of a seed, a multiple of 2**-24, which fp32 holds."""
    return (_mixed(seed) >> 40) / (1 << 24)


_MASK = (1 << 64) - 1


def _mixed(value: int) -> int:
    """splitmix64: each bit of the result depends on all of the value's."""
    value = value + 0x9E3779B97F4A7C15 & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def _table(length: int, device: torch.device) -> torch.Tensor:
    table = _tables.get(device)
    if table is None or table.numel() < length:
        size = max(_SMALLEST_TABLE, 1 << (length - 1).bit_length())
        generator = torch.Generator().manual_seed(_TABLE_SEED)
        table = _tables[device] = torch.rand(size, generator=generator).to(device)
    return table
