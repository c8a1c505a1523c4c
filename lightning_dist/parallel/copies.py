"""Copies of sharded modules are refused: torch would copy one rank's shards, or say only that it cannot."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from lightning_dist.errors import CombinationError
from lightning_dist.parallel.fsdp_groups import params_of


class RefusedCopies:
    """Makes ``copy.deepcopy`` of a module that has shards an error that says what to write.

    Args:
        root: Its modules are meant, itself excepted.
    """

    def __init__(self, root: nn.Module) -> None:
        holders = {param._module_info.module for param in params_of(root)}
        self._modules = [m for m in root.modules() if m is not root and not holders.isdisjoint(m.modules())]
        for module in self._modules:
            vars(module)["__deepcopy__"] = _refuse

    def release(self) -> None:
        """Allow them again."""
        for module in self._modules:
            vars(module).pop("__deepcopy__", None)


def _refuse(memo: Any) -> NoReturn:
    raise CombinationError(
        "a copy of a module whose weights are spread over ranks would hold one rank's part. For averaged weights use "
        "lightning.pytorch.callbacks.EMAWeightAveraging; for whole weights take state_dict() on all ranks; or make the "
        "copy in setup(), before the module is sharded"
    )
