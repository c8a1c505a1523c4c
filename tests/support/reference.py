"""A training run in one process, in fp32, that every parallel run is compared against.

The loss of a step is the mean over ranks of the mean over the rank's batch, and under accumulation the sum over
micro-batches divided by the length of a full window, also in a short last window, as under Lightning's ddp. Each rank's
gradient is computed alone, in fp32; the mean over ranks is taken in fp64 and rounded once, so that what a parallel run
differs by is its own rounding. BatchNorm statistics are rank 0's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ReferenceStep:
    """The state after one optimizer step.

    Attributes:
        loss: Mean over ranks and over the window's micro-batches.
        rank_losses: The loss of each micro-batch, ``[micro-batch][rank]``.
        gradients: Name -> mean gradient before clipping; ``None`` where no rank used the parameter.
        gradient_norm: Global 2-norm before clipping.
        weights: Name -> value, parameters and buffers.
        optimizer_state: Parameter name -> its entries in the optimizer's state.
    """

    loss: float
    rank_losses: tuple[tuple[float, ...], ...]
    gradients: dict[str, Tensor | None]
    gradient_norm: float
    weights: dict[str, Tensor]
    optimizer_state: dict[str, dict[str, Any]]


def train_reference(
    *,
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    batches: Sequence[Sequence[Any]],
    loss_of: Callable[[nn.Module, Any], Tensor],
    accumulation: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    seed: int = 0,
) -> list[ReferenceStep]:
    """Train as ``len(batches)`` data-parallel ranks would; the state after each step.

    Args:
        make_model: Makes the model, under ``seed``.
        make_optimizer: Makes the optimizer of its trainable parameters.
        batches: ``batches[rank][i]`` is the i-th micro-batch of a rank; as many for each rank.
        loss_of: ``loss_of(model, batch)``, the mean loss over a rank's batch.
        accumulation: Micro-batches a step; the last step may have fewer.
        clip_norm: Largest global 2-norm of the mean gradient.
        clip_value: Largest absolute entry of the mean gradient.
        seed: Seeds torch before the model is made.

    Raises:
        ValueError: Ranks have different numbers of micro-batches.
    """
    lengths = {len(rank_batches) for rank_batches in batches}
    if len(lengths) != 1:
        raise ValueError(f"each rank needs as many micro-batches, got {[len(b) for b in batches]}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model()
        optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
        model.train()
        steps = []
        for first in range(0, lengths.pop(), accumulation):
            window = [rank_batches[first : first + accumulation] for rank_batches in batches]
            steps.append(_step(model, optimizer, window, loss_of, accumulation, clip_norm, clip_value))
        return steps


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    window: Sequence[Sequence[Any]],
    loss_of: Callable[[nn.Module, Any], Tensor],
    accumulation: int,
    clip_norm: float | None,
    clip_value: float | None,
) -> ReferenceStep:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums: dict[str, Tensor] = {}
    losses: list[list[float]] = []
    start = {name: buffer.clone() for name, buffer in model.named_buffers()}
    after_rank_0 = start
    for rank, micro_batches in enumerate(window):
        _load_buffers(model, start)
        model.zero_grad(set_to_none=True)
        rank_losses = []
        for batch in micro_batches:
            loss = loss_of(model, batch)
            (loss / accumulation).backward()
            rank_losses.append(float(loss.detach()))
        losses.append(rank_losses)
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                gradient = parameter.grad.detach().double()
                sums[name] = sums[name] + gradient if name in sums else gradient
        if rank == 0:
            after_rank_0 = {name: buffer.clone() for name, buffer in model.named_buffers()}
    _load_buffers(model, after_rank_0)
    for name, parameter in parameters.items():
        parameter.grad = (sums[name] / len(window)).to(parameter.dtype) if name in sums else None
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()}
    present = [p for p in parameters.values() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in present if p.grad is not None]))
    if clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(present, clip_norm)
    if clip_value is not None:
        torch.nn.utils.clip_grad_value_(present, clip_value)
    optimizer.step()
    by_micro_batch = tuple(zip(*losses, strict=True))
    flat = [loss for rank_losses in losses for loss in rank_losses]
    return ReferenceStep(
        loss=sum(flat) / len(flat),
        rank_losses=by_micro_batch,
        gradients=gradients,
        gradient_norm=norm,
        weights={name: value.detach().clone() for name, value in model.state_dict().items()},
        optimizer_state=optimizer_state_by_name(model, optimizer),
    )


def _load_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(values[name])


def optimizer_state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Parameter name -> a copy of its entries in the optimizer's state."""
    return {
        name: copy.deepcopy(dict(optimizer.state[parameter]))
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def differences(actual: dict[str, Any], expected: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, largest absolute difference) for every tensor or number of two nested dicts of the same names.

    Raises:
        AssertionError: Names, shapes or types differ.
    """
    assert actual.keys() == expected.keys(), f"names differ: {sorted(actual.keys() ^ expected.keys())}"
    for name, value in expected.items():
        other = actual[name]
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", size) for inner, size in differences(other, value))
        elif isinstance(value, Tensor) and isinstance(other, Tensor):
            assert other.shape == value.shape, f"{name}: shape {tuple(other.shape)}, expected {tuple(value.shape)}"
            assert other.dtype == value.dtype, f"{name}: {other.dtype}, expected {value.dtype}"
            difference = (other.detach().double() - value.detach().double()).abs()
            yield name, float(difference.max()) if difference.numel() else 0.0
        elif isinstance(value, int | float):
            yield name, abs(float(other) - float(value))
        else:
            assert other == value, f"{name}: {other!r}, expected {value!r}"


def assert_same(actual: dict[str, Any], expected: dict[str, Any], *, atol: float) -> None:
    """Compare weights, gradients or optimizer states; the message lists the worst names.

    Args:
        actual: Of the parallel run.
        expected: Of the reference.
        atol: Largest absolute difference allowed; state its reason where it is chosen.
    """
    worst = sorted(differences(actual, expected), key=lambda pair: -pair[1] if pair[1] == pair[1] else -float("inf"))
    wrong = [(name, size) for name, size in worst if not size <= atol]
    if wrong:
        listed = ", ".join(f"{name} {size:.3g}" for name, size in wrong[:8])
        raise AssertionError(f"{len(wrong)} of {len(worst)} entries differ by more than {atol:g}: {listed}")
