"""Buckets start while backward goes on, in one order, and what is late or missing is an error; without other ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.futures import Future

from lightning_dist.errors import LateGradientError, UnusedParametersError
from lightning_dist.gradsync.part_average import PartAverage


class Doubling:
    """Lanes of two ranks; the mean over them is twice what this one has. Notes what is sent, and when."""

    def __init__(self) -> None:
        self.members = (0, 1)
        self.feedback = None
        self.sent: list[int] = []
        self.log: list[str] = []
        self._under_way: torch.Tensor | None = None

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, *, mean: bool, then: Callable[[], None], account: None
    ) -> Future[torch.Tensor]:
        assert mean
        assert tensor.numel() == 2 * output.numel()
        self.sent.append(tensor.numel())
        self.log.append("bucket")
        self._under_way = tensor * 2
        then()
        return done(output)

    def all_gather(
        self, output: torch.Tensor, tensor: torch.Tensor, *, codec: None, account: None
    ) -> Future[torch.Tensor]:
        assert self._under_way is not None
        return done(output.copy_(self._under_way))


def done(value: torch.Tensor) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future()
    future.set_result(value)
    return future


def make(*sizes: int, bucket_bytes: int = 16, vote: Any = None) -> Any:
    """Layers in a row: y = a * (b * (c * x)); each a parameter of its size, summed."""
    names = "abcdef"[: len(sizes)]
    parameters = {name: nn.Parameter(torch.ones(size)) for name, size in zip(names, sizes, strict=True)}
    lanes = Doubling()
    average = PartAverage(parameters, lanes, bucket_bytes=bucket_bytes, vote=vote)  # type: ignore[arg-type]
    return SimpleNamespace(parameters=parameters, lanes=lanes, average=average)


def backward(case: Any, *used: str) -> None:
    x = torch.ones(())
    for name, parameter in case.parameters.items():
        if not used or name in used:
            x = x * parameter.sum()
    case.average.before_backward()
    x.backward()
    case.average.after_backward()


def test_a_bucket_starts_as_soon_as_it_is_full_and_others_wait_their_turn() -> None:
    case = make(1, 2, 3)
    for name, parameter in case.parameters.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: case.lanes.log.append(name))
    backward(case)
    # c, the last of the row, comes first; what this test hooks runs before what is hooked at the first backward.
    assert case.lanes.log == ["c", "bucket", "b", "a", "bucket"]
    assert case.lanes.sent == [4, 4], "3 values padded to 4, and 2 and 1 padded to 4"
    assert torch.equal(case.parameters["a"].grad, torch.full((1,), 2 * 6.0))
    assert torch.equal(case.parameters["c"].grad, torch.full((3,), 2 * 2.0))


def test_nothing_is_sent_inside_a_window_and_its_sum_is_sent_at_the_end() -> None:
    case = make(2)
    with case.average.no_sync():
        backward(case)
    assert case.lanes.sent == []
    backward(case)
    assert torch.equal(case.parameters["a"].grad, torch.full((2,), 4.0))


def test_a_parameter_without_a_gradient_is_named() -> None:
    case = make(1, 1)
    with pytest.raises(UnusedParametersError, match=r"that training_step returned: b\. .* find_unused_parameters"):
        backward(case, "a")
    assert case.lanes.sent == [2], "the others do not wait for it"


def test_one_that_another_rank_used_gets_its_mean_and_one_that_none_used_stays_without() -> None:
    case = make(1, 1, 1, vote=lambda said: [True, True, False])
    backward(case, "a")
    assert torch.equal(case.parameters["b"].grad, torch.zeros(1))
    assert case.parameters["c"].grad is None


def test_a_gradient_that_comes_after_its_bucket_left_is_an_error() -> None:
    case = make(1)
    x = case.parameters["a"] * 1.0
    case.average.before_backward()
    x.sum().backward(retain_graph=True)
    with pytest.raises(LateGradientError, match="the gradient of a changed"):
        x.sum().backward()


def test_parameters_frozen_and_thawed_change_what_is_sent() -> None:
    case = make(1, 3)
    case.parameters["a"].requires_grad_(False)
    backward(case)
    case.parameters["a"].requires_grad_(True)
    backward(case)
    assert case.lanes.sent == [4, 4]
    case.average.release()
    backward(case)
    case.average.release()


def test_types_do_not_mix() -> None:
    case = make(1, 1)
    case.parameters["b"].data = case.parameters["b"].data.double()
    backward(case)
    assert case.lanes.sent == [2, 2]
