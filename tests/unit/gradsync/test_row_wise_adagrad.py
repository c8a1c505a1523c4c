"""Row-wise Adagrad against its rule written out, with dense and with sparse gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dist import RowWiseAdagrad
from lightning_dist.errors import ConfigError

ROWS, WIDTH, STEPS = 6, 4, 5


def gradients(step: int) -> torch.Tensor:
    """[ROWS, WIDTH], with rows that are zero."""
    dense = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    dense[[step % ROWS, (step + 2) % ROWS]] = 0
    return dense


def as_sparse(dense: torch.Tensor) -> torch.Tensor:
    """Its rows other than zero, each twice, as halves, from the last to the first."""
    rows = dense.abs().sum(1).nonzero()[:, 0].flip(0)
    values = dense[rows] / 2
    return torch.sparse_coo_tensor(
        torch.cat([rows, rows])[None], torch.cat([values, values]), dense.shape, check_invariants=True
    )


def trained(*, sparse: bool, dtype: torch.dtype = torch.float32, lr: float = 0.5) -> torch.Tensor:
    parameter = nn.Parameter(torch.ones(ROWS, WIDTH, dtype=dtype))
    optimizer = RowWiseAdagrad([parameter], lr=lr, initial_accumulator_value=0.25)
    for step in range(STEPS):
        gradient = gradients(step).to(dtype)
        parameter.grad = as_sparse(gradient) if sparse else gradient
        optimizer.step()
    return parameter.detach()


def by_the_rule(lr: float = 0.5) -> torch.Tensor:
    rows, sums = torch.ones(ROWS, WIDTH, dtype=torch.float64), [0.25] * ROWS
    for step in range(STEPS):
        for row, gradient in enumerate(gradients(step).double()):
            sums[row] += float((gradient**2).mean())
            rows[row] -= lr * gradient / (sums[row] ** 0.5 + 1e-8)
    return rows


def test_it_is_the_rule_with_either_kind_of_gradient() -> None:
    torch.testing.assert_close(trained(sparse=False).double(), by_the_rule(), rtol=1e-6, atol=1e-6)
    assert torch.equal(trained(sparse=True), trained(sparse=False)), "halves add up exactly"


def test_rows_without_a_gradient_stay() -> None:
    parameter = nn.Parameter(torch.ones(ROWS, WIDTH))
    optimizer = RowWiseAdagrad([parameter])
    parameter.grad = as_sparse(torch.zeros(ROWS, WIDTH).index_fill_(0, torch.tensor([3]), 1.0))
    optimizer.step()
    changed = (parameter != 1).any(1).nonzero()[:, 0]
    assert changed.tolist() == [3]
    assert optimizer.state[parameter]["sum"].tolist() == [0, 0, 0, 1, 0, 0]


def test_any_number_of_axes() -> None:
    vector, scalar, cube = (nn.Parameter(torch.ones(shape)) for shape in ((3,), (), (2, 2, 2)))
    optimizer = RowWiseAdagrad([vector, scalar, cube], lr=0.5)
    for each in (vector, scalar, cube):
        each.grad = torch.full_like(each, 2.0)
    optimizer.step()
    for each in (vector, scalar, cube):
        assert torch.equal(each, torch.full_like(each, 0.5)), "a first step is lr long"


def test_sums_stay_in_fp32_beside_smaller_parameters_also_when_loaded() -> None:
    parameter = nn.Parameter(torch.ones(ROWS, WIDTH, dtype=torch.bfloat16))
    optimizer = RowWiseAdagrad([parameter])
    parameter.grad = gradients(0).bfloat16()
    optimizer.step()
    sums = optimizer.state[parameter]["sum"]
    assert sums.dtype is torch.float32
    other = RowWiseAdagrad([nn.Parameter(parameter.detach().clone())])
    other.load_state_dict(optimizer.state_dict())
    loaded = other.state[other.param_groups[0]["params"][0]]["sum"]
    assert torch.equal(loaded, sums)
    assert not torch.equal(sums, sums.bfloat16().float()), "there is something to lose"


def test_a_closure_has_gradients() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = RowWiseAdagrad([parameter])

    def closure() -> torch.Tensor:
        loss = parameter.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert (parameter < 1).all()


@pytest.mark.parametrize("name", ["lr", "eps", "initial_accumulator_value"])
def test_values_out_of_range(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"RowWiseAdagrad\({name}=-1\): it must be 0 or more"):
        RowWiseAdagrad([nn.Parameter(torch.ones(1))], **{name: -1})
