"""Adagrad with one number a row: what large embeddings are trained with, at a fraction of the optimizer's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_dist.errors import ConfigError


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad whose sum of squares is kept once a row, in fp32, of the mean over the row's values.

    For row i with gradient g: ``sum[i] += mean(g ** 2)``, ``row[i] -= lr * g / (sqrt(sum[i]) + eps)``. A table of
    1,000,000 x 64 keeps 4 MB beside it, where Adagrad keeps 256 MB and Adam 512 MB. Rows without a gradient stay as
    they are, so a sparse gradient and the same as a dense one give the same. The first axis of a parameter counts its
    rows.

    As in DLRM (Naumov et al., 2019) and in FBGEMM, ``EXACT_ROWWISE_ADAGRAD``.

    Args:
        params: As for any optimizer; gradients may be sparse.
        lr: Learning rate.
        eps: Added to the root.
        initial_accumulator_value: Of each row's sum before the first step.

    Raises:
        ConfigError: A value is out of its range.
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-2, *, eps: float = 1e-8, initial_accumulator_value: float = 0.0
    ) -> None:
        given = {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value}
        for name, value in given.items():
            if not value >= 0:
                raise ConfigError(f"RowWiseAdagrad({name}={value}): it must be 0 or more")
        super().__init__(params, given)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step.

        Args:
            closure: Evaluates the loss anew, with gradients.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)
        return loss

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            start = group["initial_accumulator_value"]
            size = (parameter.shape[0] if parameter.ndim else 1,)
            state["sum"] = torch.full(size, start, dtype=torch.float32, device=parameter.device)
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
            if gradient.sparse_dim() != 1:
                raise ValueError(f"a row-wise step takes gradients with one sparse axis, got {gradient.sparse_dim()}")
            parameter.index_add_(0, rows, _change(values, state["sum"], rows, group).to(parameter.dtype))
        else:
            values = gradient if gradient.ndim else gradient.view(1)
            rows = torch.arange(len(values), device=values.device)
            parameter.add_(_change(values, state["sum"], rows, group).to(parameter.dtype).view_as(parameter))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a state; sums stay in fp32, where torch would round them to the type of the parameter."""
        super().load_state_dict(state_dict)
        for parameter, entry in zip(_numbers(state_dict), _parameters(self.param_groups), strict=True):
            kept = state_dict["state"].get(parameter)
            if kept:
                self.state[entry]["sum"] = kept["sum"].to(entry.device, torch.float32, copy=True)


def _change(values: Tensor, sums: Tensor, rows: Tensor, group: dict[str, Any]) -> Tensor:
    """[n, ...] of fp32: what is added to some rows, whose sums are brought up to date."""
    exact = values.float()
    flat = exact.reshape(len(values), -1)
    sums[rows] += flat.square().mean(1)
    scale: Tensor = -group["lr"] / (sums[rows].sqrt() + group["eps"])
    return flat.mul(scale[:, None]).view_as(exact)


def _numbers(state_dict: dict[str, Any]) -> Iterable[Any]:
    return [number for group in state_dict["param_groups"] for number in group["params"]]


def _parameters(groups: list[dict[str, Any]]) -> list[Tensor]:
    return [parameter for group in groups for parameter in group["params"]]
