"""Copies in host memory that is used again."""

from __future__ import annotations

import torch

from lightning_dist.checkpoint.host_copies import HostCopies

CPU = torch.device("cpu")


def of_all_kinds() -> list[torch.Tensor]:
    matrix = torch.arange(12.0).reshape(3, 4)
    return [
        matrix,
        matrix.t(),
        matrix[:, 1:3],
        torch.tensor(7),
        torch.empty(0, 5),
        torch.tensor([True, False, True]),
        torch.arange(5, dtype=torch.bfloat16),
        torch.arange(3, dtype=torch.float64),
        torch.view_as_complex(torch.arange(6.0).reshape(3, 2)),
        torch.arange(4.0).to(torch.float8_e4m3fn),
        torch.nn.Parameter(torch.ones(2)),
    ]


def test_copies_are_equal_and_contiguous_and_of_the_same_kind() -> None:
    tensors = of_all_kinds()
    copies = HostCopies(CPU).take(tensors)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert copy.dtype == tensor.dtype
        assert copy.shape == tensor.shape
        assert copy.is_contiguous()
        assert not copy.requires_grad
        assert torch.equal(copy.view(torch.uint8) if copy.dim() else copy, _bytes(tensor) if copy.dim() else tensor)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def test_later_changes_do_not_reach_the_copies() -> None:
    weights = torch.ones(1000)
    copies = HostCopies(CPU)
    (copy,) = copies.take([weights])
    copies.complete()
    weights.fill_(2)
    assert bool((copy == 1).all())


def test_memory_is_used_again_and_grows_only_when_it_must() -> None:
    copies = HostCopies(CPU)
    first = copies.take([torch.zeros(1000), torch.zeros(3)])
    size_bytes = copies.size_bytes
    assert 4003 <= size_bytes <= 4003 + 3 * 64
    second = copies.take([torch.ones(500)])
    assert copies.size_bytes == size_bytes
    assert second[0].data_ptr() == first[0].data_ptr()
    copies.take([torch.zeros(2000)])
    assert copies.size_bytes == 8000
    copies.release()
    copies.release()
    assert copies.size_bytes == 0
    assert torch.equal(copies.take([torch.ones(3)])[0], torch.ones(3))
