"""Where the layers of a stage are split over ranks too: what a rank holds of a tensor, and what leaves a stage."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_dist.errors import ConfigError
from lightning_dist.parallel.tensor import TensorParallel
from lightning_dist.parallel.tensor.logits import gathered


def part_of(tensor: Tensor) -> Tensor:
    """This rank's part, with its memory; a plain tensor is all of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class StageEnds:
    """Sees to it that what leaves a stage is whole, and plain.

    Args:
        modules: Name -> module of each stage here, and whether it is the last, whose output may be split logits.
        split: What has split their layers.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module, bool]], split: TensorParallel) -> None:
        self._split = split
        for name, module, is_last in modules:
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(partial(self._end, name, is_last))

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._split.leave_region()  # what is recomputed may have ended inside one

    def _end(self, name: str, is_last: bool, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        opened_by = self._split.leave_region()
        if opened_by is not None:
            raise ConfigError(
                f"{name} ends behind {opened_by}, whose output is split over ranks, and before the row layer that is "
                "to take it: put both into one of the module's pipeline layers, and let the plan say row of the second"
            )
        return output if is_last else gathered(output)
