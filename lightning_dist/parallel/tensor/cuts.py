"""Which dim of each parameter a plan cuts, for whoever computes with sizes; nothing is split."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import Shard

from lightning_dist.parallel.tensor.layers import placements_of
from lightning_dist.parallel.tensor.plan import split_model
from lightning_dist.parallel.tensor.survey import survey


def cut_dims(model: nn.Module, *, size: int, plan: str | Mapping[str, str] = "auto") -> dict[str, int]:
    """Parameter name -> dim that tensor parallelism cuts; parameters that are whole on each rank are not in it.

    Args:
        model: On any device but ``meta``, where no plan can be checked.
        size: Ranks that share each layer.
        plan: As :func:`~lightning_dist.parallel.tensor.model.parallelize` takes it.

    Raises:
        ConfigError: The plan does not fit the model or the size.
    """
    split = split_model(survey(model), size=size, plan=plan)
    placed = {path: placements_of(model.get_submodule(path), style) for path, style in split.layers.items()}
    return {
        f"{path}.{name}" if path else name: placement.dim
        for path, placements in placed.items()
        for name, placement in placements.items()
        if isinstance(placement, Shard)
    }
