"""Weights written where the module shows gathered copies, inside a step: what was written would be lost in silence."""

from __future__ import annotations

import torch
from torch import nn

from lightning_dist.errors import CombinationError
from lightning_dist.parallel.fsdp_groups import ShardedParam, name_of, params_of, some_of


class LostWrites:
    """Looks at version counters, which FSDP2 keeps as they are when it gathers, and at whose memory a parameter has.

    Args:
        root: Its parameters are looked at.
    """

    def __init__(self, root: nn.Module) -> None:
        self._params = params_of(root)
        self._versions = [_gathered(param)._version for param in self._params]

    def check(self) -> None:
        """At the end of a window.

        Raises:
            CombinationError: A gathered copy was written since.
        """
        versions = [_gathered(param)._version for param in self._params]
        if versions == self._versions and not any(map(_was_replaced, self._params)):
            return
        before, self._versions = self._versions, versions
        written = [
            name_of(param)
            for param, old, new in zip(self._params, before, versions, strict=True)
            if old != new or _was_replaced(param)
        ]
        raise CombinationError(
            f"{some_of(written)} was written inside of a step, or of a window of accumulation, where the module shows "
            "gathered copies: the change is lost. Write weights after the optimizer's step, in on_train_batch_end, in "
            "place under torch.no_grad(); or write parallel=ddp"
        )


def _was_replaced(param: ShardedParam) -> bool:
    return _gathered(param).data_ptr() != param.all_gather_outputs[0].data_ptr()


def _gathered(param: ShardedParam) -> torch.Tensor:
    """The copy that the module shows; of a split layer its local part, as the wrapper has a count of its own."""
    shown: torch.Tensor = getattr(param._unsharded_param, "_local_tensor", param._unsharded_param)
    return shown
