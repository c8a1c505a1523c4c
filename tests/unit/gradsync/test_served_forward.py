"""What stands in for the forward of embeddings and bags, against torch's own with the whole table."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.gradsync.parameter_server.embeddings import Embedding, forward_of, tables_to_serve

ROWS, WIDTH = 9, 3
IDS = torch.tensor([4, 0, 4, 8, 2, 2, 2, 5])


def through(module: Embedding, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """(output, dense gradient) by rows that are looked up."""
    found: list[tuple[Tensor, Tensor]] = []

    def look_up(rows: Tensor) -> Tensor:
        values = module.weight.detach()[rows].requires_grad_()
        found.append((rows, values))
        return values

    output = forward_of(module, ROWS, look_up)(*arguments, **named)
    gradient = torch.zeros(ROWS, WIDTH)
    if output.requires_grad:
        (output.sin().sum()).backward()
        for rows, values in found:
            if values.grad is not None:
                gradient.index_add_(0, rows, values.grad)
    return output.detach(), gradient


def by_torch(module: Embedding, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    module.weight.grad = None
    output = module(*arguments, **named)
    output.sin().sum().backward()
    assert module.weight.grad is not None
    return output.detach(), module.weight.grad.to_dense()


def check(module: Embedding, *arguments: Any, **named: Any) -> None:
    for got, expected in zip(through(module, *arguments, **named), by_torch(module, *arguments, **named), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("padding", [None, 2, 7])
@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2)])
def test_embeddings(padding: int | None, shape: tuple[int, ...]) -> None:
    check(nn.Embedding(ROWS, WIDTH, sparse=True, padding_idx=padding), IDS.view(shape))


BAGS = list(itertools.product(["sum", "mean"], [None, 2, 7], [False, True], [torch.int32, torch.int64]))


@pytest.mark.parametrize(("mode", "padding", "last", "dtype"), BAGS)
def test_bags_with_offsets(mode: str, padding: int | None, last: bool, dtype: torch.dtype) -> None:
    module = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode=mode, padding_idx=padding, include_last_offset=last)
    check(module, IDS.to(dtype), torch.tensor([0, 3, 3, 8] if last else [0, 3, 3], dtype=dtype))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_equal_size(mode: str) -> None:
    check(nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode=mode), IDS.view(4, 2))


def test_weights_of_samples_have_gradients() -> None:
    module = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum")
    offsets, weights = torch.tensor([0, 5]), torch.arange(8.0)
    ours, torchs = weights.clone().requires_grad_(), weights.clone().requires_grad_()
    got = through(module, IDS, offsets, per_sample_weights=ours)
    expected = by_torch(module, IDS, offsets, per_sample_weights=torchs)
    for one, other in zip((*got, ours.grad), (*expected, torchs.grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_bags_without_any_id() -> None:
    module = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum")
    output, gradient = through(module, IDS[:0], torch.tensor([0, 0]))
    assert torch.equal(output, torch.zeros(2, WIDTH))
    assert not gradient.any()


def test_an_id_that_is_no_row() -> None:
    module = nn.EmbeddingBag(ROWS, WIDTH, sparse=True)
    with pytest.raises(IndexError, match="ids from 0 to 9 of a table of 9 rows"):
        through(module, torch.tensor([0, 9]), torch.tensor([0]))


class Several(nn.Module):
    """Those that are served, and those that need their table whole."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, sparse=True)
        self.dense = nn.EmbeddingBag(ROWS, WIDTH)
        self.largest = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="max")
        self.bounded = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, max_norm=1.0)
        self.scaled = nn.Embedding(ROWS, WIDTH, sparse=True, scale_grad_by_freq=True)
        self.frozen = nn.EmbeddingBag.from_pretrained(torch.ones(ROWS, WIDTH), freeze=True, sparse=True)
        self.small = nn.EmbeddingBag(1, 1, sparse=True)
        self.one = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.other = nn.EmbeddingBag(ROWS, WIDTH, sparse=True)
        self.other.weight = self.one.weight


def test_which_are_served() -> None:
    assert list(tables_to_serve(Several(), above_bytes=4)) == ["words", "bags"]
