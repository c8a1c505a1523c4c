"""The single-process reference: its gradient is the mean over ranks, its window and clipping are Lightning's."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.support.ranks import RankContext, RankPool
from tests.support.reference import assert_same, train_reference

Batch = tuple[Tensor, Tensor]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 3))


def make_batches(*, num_ranks: int, num_batches: int) -> list[list[Batch]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [(torch.randn(4, 7, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(num_batches)]
        for _ in range(num_ranks)
    ]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


make_sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def train_ddp(context: RankContext, batches: list[list[Batch]]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = make_model()
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = make_sgd(model.parameters())
    for batch in batches[context.rank]:
        optimizer.zero_grad()
        loss_of(ddp, batch).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_ranks_of_equal_batches_are_one_rank_of_a_large_batch() -> None:
    batches = make_batches(num_ranks=2, num_batches=3)
    together = [[tuple(torch.cat(pair) for pair in zip(a, b, strict=True)) for a, b in zip(*batches, strict=True)]]
    two = train_reference(make_model=make_model, make_optimizer=make_sgd, batches=batches, loss_of=loss_of)
    one = train_reference(make_model=make_model, make_optimizer=make_sgd, batches=together, loss_of=loss_of)
    for step, expected in zip(two, one, strict=True):
        assert step.loss == pytest.approx(expected.loss, abs=1e-6)
        assert_same(step.weights, expected.weights, atol=1e-6)  # fp32 rounding of three steps
        assert_same(step.optimizer_state, expected.optimizer_state, atol=1e-6)
    assert two[0].loss != two[-1].loss


def test_ddp_on_ranks_agrees(ranks: RankPool) -> None:
    batches = make_batches(num_ranks=3, num_batches=4)
    reference = train_reference(make_model=make_model, make_optimizer=make_sgd, batches=batches, loss_of=loss_of)
    for weights in ranks.run(train_ddp, world_size=3, args=(batches,)):
        assert_same(weights, reference[-1].weights, atol=1e-6)  # fp32 rounding of four steps


def test_a_short_last_window_is_divided_by_a_full_windows_length() -> None:
    batches = make_batches(num_ranks=1, num_batches=4)
    steps = train_reference(
        make_model=make_model, make_optimizer=make_sgd, batches=batches, loss_of=loss_of, accumulation=3
    )
    assert [len(step.rank_losses[0]) for step in steps] == [1, 1]
    assert [len(step.rank_losses) for step in steps] == [3, 1]
    model = make_model()
    model.load_state_dict(steps[0].weights)
    (loss_of(model, batches[0][3]) / 3).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_same(gradients, steps[1].gradients, atol=0.0)


def test_clipping_uses_the_mean_gradient() -> None:
    train = partial(
        train_reference,
        make_model=make_model,
        make_optimizer=partial(torch.optim.SGD, lr=1.0),
        batches=make_batches(num_ranks=2, num_batches=1),
        loss_of=loss_of,
    )
    (free,), (by_norm,), (by_value,) = train(), train(clip_norm=0.01), train(clip_value=0.001)
    assert free.gradient_norm == by_norm.gradient_norm > 0.01
    torch.manual_seed(0)
    start = make_model().state_dict()
    moved_norm = torch.stack([(by_norm.weights[name] - start[name]).norm() for name in start]).norm()
    assert float(moved_norm) == pytest.approx(0.01, rel=1e-3)
    largest = max(float((by_value.weights[name] - start[name]).abs().max()) for name in start)
    assert largest == pytest.approx(0.001, rel=1e-3)


def test_the_callers_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    train_reference(
        make_model=make_model,
        make_optimizer=make_sgd,
        batches=make_batches(num_ranks=1, num_batches=1),
        loss_of=loss_of,
    )
    assert torch.equal(before, torch.get_rng_state())


def test_differences_are_named_with_the_worst_first() -> None:
    expected = {"a": torch.zeros(2), "b": torch.zeros(2)}
    actual = {"a": torch.full((2,), 0.1), "b": torch.tensor([0.0, float("nan")])}
    with pytest.raises(AssertionError, match=r"2 of 2 entries differ by more than 0.01: b nan, a 0.1"):
        assert_same(actual, expected, atol=0.01)


def test_uneven_numbers_of_batches_are_refused() -> None:
    batches = make_batches(num_ranks=2, num_batches=2)
    with pytest.raises(ValueError, match=r"as many micro-batches, got \[2, 1\]"):
        train_reference(
            make_model=make_model, make_optimizer=make_sgd, batches=[batches[0], batches[1][:1]], loss_of=loss_of
        )
