"""A matrix as a product of two thin ones: one step of subspace iteration. Pure.

Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization",
NeurIPS 2019: of the mean M of all ranks' matrices, ``P = M Q`` is a sum over ranks, then ``Q = M^T P`` with orthonormal
columns of P is another, and ``P Q^T`` stands for M. Both are the same on all ranks, so its rounding is.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

_LEAST_GAIN = 2  # what is not made smaller by this stays exact


class Shape(NamedTuple):
    """Of a matrix."""

    rows: int
    columns: int


def matrix_of(sizes: Sequence[int], rank: int) -> Shape | None:
    """The matrix that a parameter is taken for: its first dimension by all others; ``None``: it stays exact.

    Args:
        sizes: Of its dimensions.
        rank: Columns of the factors.
    """
    if len(sizes) < 2:
        return None
    rows, columns = sizes[0], math.prod(sizes[1:])
    is_worth_it = _LEAST_GAIN * rank * (rows + columns) <= rows * columns and rows and columns
    return Shape(rows, columns) if is_worth_it else None


def description(parameters: Iterable[Sequence[int]], rank: int) -> str:
    """What becomes of a model's gradients, in a line.

    Args:
        parameters: Sizes of the dimensions of each that is trained.
        rank: Columns of the factors.
    """
    matrices = exact = whole = sent = 0
    for sizes in parameters:
        shape, count = matrix_of(sizes, rank), math.prod(sizes)
        whole += count
        if shape is None:
            exact, sent = exact + 1, sent + count
        else:
            matrices, sent = matrices + 1, sent + rank * (shape.rows + shape.columns)
    return (
        f"{matrices} matrices as two factors of {rank} columns, {exact} other parameters exact: {sent:,} values of "
        f"{whole:,}, 1/{whole / max(sent, 1):.1f}"
    )


def first_factor(name: str, columns: int, rank: int, *, window: int) -> torch.Tensor:
    """Random, the same on every rank and each time; ``[columns, rank]`` on the CPU.

    Args:
        name: Of the parameter.
        columns: Of its matrix.
        rank: Of the factor.
        window: How many times gradients have been synchronised before.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{window} {name}".encode()))
    return torch.randn(columns, rank, generator=generator)


def orthonormal(values: torch.Tensor) -> torch.Tensor:
    """Columns of the same span, orthonormal; of dependent ones, any. Alike for the same values on a kind of device."""
    columns: torch.Tensor = torch.linalg.qr(values).Q
    return columns


def as_good(values: torch.Tensor) -> torch.Tensor:
    """[] bool: whether all are finite; on a device it is not waited for."""
    return torch.isfinite(values).all()
