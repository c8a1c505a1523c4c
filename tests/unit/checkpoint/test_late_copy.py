"""Copies that go on while the caller does, and the moment before an optimizer changes what is copied."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.checkpoint.before_steps import BeforeSteps
from lightning_dist.checkpoint.host_copies import HostCopies
from lightning_dist.checkpoint.late_copy import Late, LateCopy
from lightning_dist.errors import CheckpointError, CombinationError

CPU = torch.device("cpu")


def begin(*tensors: Tensor) -> tuple[LateCopy, list[Tensor]]:
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    late = [Late(f"weight{index}", (tensor,)) for index, tensor in enumerate(tensors)]
    return LateCopy(tensors, copies, late), copies


# -- the copy ----------------------------------------------------------------------------------------------------------


def test_nothing_is_copied_before_somebody_does_it() -> None:
    late, copies = begin(torch.ones(3), torch.ones(2))
    assert [float(copy.sum()) for copy in copies] == [0, 0]
    late.settle()
    assert [float(copy.sum()) for copy in copies] == [3, 2]
    late.complete()


def test_who_settles_copies_what_is_missing_and_waits_for_the_rest() -> None:
    """The other thread holds its first piece until this one has copied all others."""
    late, copies = begin(*(torch.full((4,), value) for value in (1.0, 2.0, 3.0)))
    others_done, begun = threading.Event(), threading.Event()
    done_here: list[float] = []
    copy_piece = LateCopy._copy_piece

    def copy(self: LateCopy, source: Tensor, copy: Tensor) -> None:
        if threading.current_thread() is writer:
            begun.set()
            assert others_done.wait(30)
        else:
            done_here.append(float(source[0]))
        copy_piece(self, source, copy)
        if len(done_here) == 2:
            others_done.set()

    with patch.object(LateCopy, "_copy_piece", copy):
        writer = threading.Thread(target=late.complete)
        writer.start()
        assert begun.wait(30)
        late.settle()
        writer.join()
    assert done_here == [2.0, 3.0]
    assert [float(each[0]) for each in copies] == [1, 2, 3]


@pytest.mark.parametrize("looks_before", [False, True])
def test_a_change_before_the_step_is_found(looks_before: bool) -> None:
    weights = [torch.ones(3), torch.ones(3)]
    late, _ = begin(*weights)
    if looks_before:
        late.complete()  # an operation may not have returned yet
    weights[1].add_(1)
    if not looks_before:
        late.settle()
    with pytest.raises(CheckpointError, match=r"weight1 was changed in place .* checkpoint\.snapshot=at_once"):
        late.complete()


def test_changes_after_the_step_are_none() -> None:
    weights = torch.ones(3)
    late, (copy,) = begin(weights)
    late.settle()
    assert late.is_settled
    weights.add_(1)
    late.complete()
    assert bool((copy == 1).all())


def test_a_piece_that_cannot_be_copied_fails_the_write_and_not_the_step() -> None:
    late, _ = begin(torch.ones(3))

    def fail(*_: Any) -> None:
        raise RuntimeError("no such memory")

    with patch.object(LateCopy, "_copy_piece", fail):
        late.settle()
    with pytest.raises(RuntimeError, match="no such memory"):
        late.complete()


def test_of_host_copies_those_are_late_that_may_be() -> None:
    steady, buffer = torch.ones(3), torch.ones(3)
    copies = HostCopies(CPU)
    of_steady, of_buffer = copies.take([steady, buffer], {0: Late("steady", (steady,))})
    buffer.add_(1)
    assert copies.is_copying
    copies.settle()
    assert not copies.is_copying
    steady.add_(1)
    copies.complete()
    assert [float(each.sum()) for each in (of_steady, of_buffer)] == [3, 3]
    copies.take([steady, buffer], {0: Late("steady", (steady,))})
    copies.take([steady, buffer])  # ends the one before
    assert float(of_steady.sum()) == 6


def test_memory_made_in_an_evaluation_serves_in_training() -> None:
    copies, weights = HostCopies(CPU), torch.ones(3)
    with torch.inference_mode():
        copies.take([weights])
    (copy,) = copies.take([weights.mul_(2)])
    assert float(copy.sum()) == 6


# -- the moment --------------------------------------------------------------------------------------------------------


Step = Callable[[Any, Callable[[], Tensor]], object]
POSITIONAL: Step = lambda optimizer, closure: optimizer.step(closure)  # noqa: E731  # parameters of a test
NAMED: Step = lambda optimizer, closure: optimizer.step(closure=closure)  # noqa: E731
WITHOUT: Step = lambda optimizer, closure: closure() is not None and optimizer.step()  # noqa: E731


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        pytest.param("adamw", POSITIONAL, id="adamw-positional"),
        pytest.param("adamw", NAMED, id="adamw-named"),
        pytest.param("adamw", WITHOUT, id="adamw-without"),
        pytest.param("lbfgs", NAMED, id="lbfgs-named"),  # several calls of the closure, with changes between them
    ],
)
def test_the_moment_is_after_the_closure_and_before_a_change(kind: str, step: Step) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.LBFGS([weight], max_iter=3) if kind == "lbfgs" else torch.optim.AdamW([weight], lr=0.1)
    seen: list[Any] = []

    def closure() -> Tensor:
        seen.append("closure")
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    before = BeforeSteps(lambda: seen.append(weight.detach().clone()))
    before.watch([optimizer])
    before.watch([optimizer])
    step(optimizer, closure)
    assert seen[0] == "closure"
    assert torch.equal(seen[1], torch.ones(2))
    assert not torch.equal(weight, torch.ones(2))
    assert len(seen) == 2 if kind == "adamw" else seen.count("closure") > 1
    before.release()
    before.release()
    seen.clear()
    step(optimizer, closure)
    assert set(map(str, seen)) == {"closure"}


def test_optimizers_that_do_not_say_when_they_step_are_refused() -> None:
    class Own:
        """As Lightning takes it."""

    with pytest.raises(CombinationError, match=r"Own is no torch.optim.Optimizer .* checkpoint.snapshot=at_once"):
        BeforeSteps(lambda: None).watch([Own()])  # type: ignore[list-item]
