"""Rows cut into blocks that have a number of their own each, and how the two lie in bytes: numbers first."""

from __future__ import annotations

import torch

from lightning_dist.comm.codecs.codec import typed

_NUMBER_BYTES = 4  # fp32


def num_blocks(length: int, block: int) -> int:
    """Blocks of a row, the last of which may be shorter."""
    return -(-length // block)


def padded(values: torch.Tensor, block: int) -> torch.Tensor:
    """[rows, n] as [rows, blocks, block], zeros behind; shares memory where nothing is missing."""
    rows, length = values.shape
    blocks = num_blocks(length, block)
    if blocks * block > length:
        values = torch.nn.functional.pad(values, (0, blocks * block - length))
    return values.reshape(rows, blocks, block)


def bytes_with_numbers(body_bytes: int, blocks: int) -> int:
    """Bytes of a row, ending where a number may begin."""
    return blocks * _NUMBER_BYTES + -(-body_bytes // _NUMBER_BYTES) * _NUMBER_BYTES


def joined(numbers: torch.Tensor, body: torch.Tensor) -> torch.Tensor:
    """[rows, blocks] fp32 and [rows, n] of one byte each, as bytes of a row."""
    rows, blocks = numbers.shape
    size = bytes_with_numbers(body.shape[1], blocks)
    row = torch.empty(rows, size // _NUMBER_BYTES, device=numbers.device)
    row[:, :blocks].copy_(numbers)
    out, cut = row.view(torch.uint8), blocks * _NUMBER_BYTES
    out[:, cut : cut + body.shape[1]].copy_(body.view(torch.uint8))
    out[:, cut + body.shape[1] :].zero_()
    return out


def parted(encoded: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers [rows, blocks] and the body of bytes; views."""
    cut = blocks * _NUMBER_BYTES
    return typed(encoded[:, :cut], torch.float32), encoded[:, cut:]


def finite_or_nan(numbers: torch.Tensor) -> torch.Tensor:
    """Infinite numbers become NaN, as Note [Values that are not finite] has it; finite ones stay."""
    return numbers + numbers * 0
